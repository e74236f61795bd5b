"""agent_funcs/rm_chat.py inside OpenRLHF 0.11.2, by its own loader, with a reward model that its environment names."""

import json
import textwrap
from pathlib import Path

import pytest

from tests.with_openrlhf.where import needs_openrlhf, python

pytestmark = [pytest.mark.slow, needs_openrlhf]
CONVERSATION = ["user: Hi?", "assistant: Yes.", "user: And?", "assistant: Yes."]


@pytest.fixture(scope="module")
def responses(tmp_path_factory):
    """Each prompt's response, and what the reward was shown."""
    folder = tmp_path_factory.mktemp("rm")
    (folder / "shown.py").write_text(
        textwrap.dedent(f"""
        import json

        class Shown:
            async def score(self, conversation):
                from agentenv.rewards.models.types import Scored
                with open({str(folder / "shown.jsonl")!r}, "a") as file:
                    said = [f"{{each['role']}}: {{each['content']}}" for each in conversation]
                    file.write(json.dumps(said) + "\\n")
                return Scored(float(len(conversation)))

            async def close(self):
                pass

        from agentenv.rewards.models.reward import ModelReward

        class Reward(ModelReward):
            def __init__(self):
                super().__init__(Shown(), scale=0.5)
        """)
    )
    settings = json.dumps({"reward": f"{folder / 'shown.py'}:Reward", "when": "end"})
    said = python(Path(__file__).parent / "rm_chat_in_openrlhf.py", AGENTENV_RM_CHAT=settings)
    told = [json.loads(line.removeprefix("RESPONSE ")) for line in said.splitlines() if line.startswith("RESPONSE ")]
    return dict(told), [json.loads(line) for line in (folder / "shown.jsonl").read_text().splitlines()]


def test_nemo_rl_854_in_openrlhf_the_reward_model_is_shown_raw_messages_no_matter_what_form_the_prompt_has(responses):
    told, shown = responses
    assert shown == [CONVERSATION] * 4
    for name in ("messages", "text", "rendered", "rendered, and nothing else"):
        assert told[name]["reward"] == 2.0
        assert "<|im_start|>user\nHi?<|im_end|>\n<|im_start|>assistant\nYes.<|im_end|>" in told[name]["said"]
        assert told[name]["said"].endswith("<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n")


def test_its_figures_are_logged_for_every_form_of_the_prompt(responses):
    told, _ = responses
    logs = told["messages"]["extra_logs"]
    assert (logs["rm/value"], logs["rm/length_chars"], logs["turns"], logs["failed"]) == (4.0, 4.0, 2.0, 0.0)
    assert all(each["extra_logs"] == logs for each in told.values())
