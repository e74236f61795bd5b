"""A transport of httpx for servers in memory."""

import httpx


class StreamedTransport(httpx.MockTransport):
    """Answers from memory whose bodies are read as those of a server are."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        answer = await super().handle_async_request(request)
        return httpx.Response(answer.status_code, headers=answer.headers, stream=httpx.ByteStream(answer.content))
