"""TaskProcessor: dataset rows for NeMo RL with the prompts that the environment's `reset` returns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentenv._util.loop_thread import run_sync
from agentenv.chat.chat import Chat, ChatOptions
from agentenv.core.messages import as_messages
from agentenv.core.types import Task
from agentenv.episode.runner import derive_seed
from agentenv.errors import DataError
from agentenv.interop.hosted import check_label, stepped_source
from agentenv.interop.nemo_rl.sessions import Sessions

_SHORT = 4
"""Tokens to keep of a prompt that is too long; its row is not trained on."""


class TaskProcessor:
    """A NeMo RL data processor (`register_processor`) for the rows of one of our environments.

    `extra_env_info` has `raw_prompt`, the messages of the prompt before any template (#854), and what the environment
    needs to start again: `task_prompt`, `label`, `seed`, `tools` and the row's other columns in `metadata`.

    Args:
        env: see `AgentEnvironmentOptions.env`.
        env_kwargs: arguments of the environment's constructor.
        prompt_key: the row's column with the prompt: text, which becomes a user's message, or messages.
        label_key: the row's column with the label.
        seed: the seed from which rows without their own `seed` get one.
        chat_template_kwargs: more variables of the policy's chat template.
        task_name: the environment's name in NeMo RL's configuration; the row's own takes precedence.

    Raises:
        ConfigError: the environment does not exist, or does not accept the arguments.
    """

    def __init__(
        self,
        env: Any,
        env_kwargs: Mapping[str, Any] | None = None,
        *,
        prompt_key: str = "prompt",
        label_key: str = "label",
        seed: int = 0,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        task_name: str = "agentenv",
    ) -> None:
        source = stepped_source(env, env_kwargs or {}, "TaskProcessor.env", "Serve it with GymServer.")
        self._source, self._sessions = source, Sessions(source, step_timeout_s=60.0, idle_s=60.0)
        self._prompt_key, self._label_key, self._seed, self._task_name = prompt_key, label_key, seed, task_name
        self._options = ChatOptions(chat_template_kwargs=dict(chat_template_kwargs or {}))
        self._chat: Chat | None = None

    def __call__(
        self, datum_dict: Mapping[str, Any], task_data_spec: Any, tokenizer: Any, max_seq_length: int | None, idx: int
    ) -> dict[str, Any]:
        """Return a DatumSpec: the rendered first observation as one message, with int64 `token_ids` and its text.

        Raises:
            DataError: the row has no prompt, or no label and the environment needs one.
            EpisodeFailed: the environment failed.
        """
        import torch

        row = dict(datum_dict)
        prompt = row.pop(self._prompt_key, None)
        if not prompt:
            raise DataError(f"row {idx}: expected a prompt under {self._prompt_key!r}, got {prompt!r}. Set prompt_key.")
        prompt = as_messages(prompt)
        label = row.pop(self._label_key, None)
        check_label(Task(prompt, label, str(idx)), datum_dict, self._source, "Set label_key.")
        seed = row.pop("seed", None)
        info = {
            "label": label,
            "seed": derive_seed(self._seed, idx) if seed is None else seed,
            "task_prompt": prompt,
            "metadata": {key: value for key, value in row.items() if key != "task_name"},
        }
        observation, tools = run_sync(self._sessions.first(info, prompt))
        if self._chat is None or self._chat.tokenizer is not tokenizer:
            self._chat = Chat(tokenizer, options=self._options)
        chat = self._chat
        ids, weight = chat.prompt(observation, list(tools) or None), 1.0
        if max_seq_length is not None and len(ids) > max_seq_length:
            ids, weight = ids[: min(_SHORT, max_seq_length)], 0.0
        content = chat.decode(ids)
        return {
            "message_log": [{"role": "user", "content": content, "token_ids": torch.tensor(ids, dtype=torch.int64)}],
            "length": len(ids),
            "extra_env_info": info | {"raw_prompt": observation, "tools": list(tools)},
            "loss_multiplier": weight,
            "idx": idx,
            "task_name": row.get("task_name", self._task_name),
        }
