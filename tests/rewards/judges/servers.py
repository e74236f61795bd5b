"""Servers of chat completions for tests: real ones, on a free port, that answer as they are told."""

import contextlib
import inspect

from tests.rewards.models.rm_servers import RESET, Status, in_turn, server


def completion(text, *, finish_reason="stop", usage=(10, 5), **message):
    """A chat completion's body."""
    message = {"role": "assistant", "content": text, **message}
    body = {"object": "chat.completion", "choices": [{"index": 0, "message": message, "finish_reason": finish_reason}]}
    if usage is not None:
        body["usage"] = {"prompt_tokens": usage[0], "completion_tokens": usage[1], "total_tokens": sum(usage)}
    return body


@contextlib.asynccontextmanager
async def chat_server(*answers):
    """Answers with these in turn, the last one for ever: text, what `rm_servers.server` takes, or a function of the
    request's body that gives such; None hangs up at once, with a reset."""
    turn = in_turn(*answers)

    async def answer(path, body):
        if path != "/v1/chat/completions":
            return Status(404)
        found = turn()
        found = found(body) if callable(found) else found
        found = await found if inspect.isawaitable(found) else found
        return completion(found) if isinstance(found, str) else RESET if found is None else found

    async with server(answer) as asked:
        asked.url += "/v1"
        yield asked
