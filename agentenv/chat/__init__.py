"""Messages to tokens and back: chat templates, dialogues, tool calls."""
