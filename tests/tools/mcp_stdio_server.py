"""An MCP server over stdio of the standard library alone, which starts at once and misbehaves on request.

`python mcp_stdio_server.py [noise]`. A barrier of two calls shows that calls overlap.
"""

import json
import os
import sys
import threading
import time

PLAIN = ("count", "env", "pid", "fail", "refuse", "server_error", "picture", "hang", "freeze", "die", "meet")
TOOLS = {
    "add": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a"]},
    "echo": {"type": "object", "properties": {"text": {"type": "string"}}, "x-kept": [1, {"any": "thing"}]},
    **{name: {"type": "object"} for name in PLAIN},
}
PAGE = 5
lock, meeting, frozen = threading.Lock(), threading.Barrier(2, timeout=30), threading.Event()
num_calls = 0


def send(message):
    with lock:
        if not frozen.is_set():
            sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
            sys.stdout.flush()


def text(said, is_error=False):
    return {"content": [{"type": "text", "text": said}], "isError": is_error}


def call(name, arguments, number):
    global num_calls
    num_calls += 1
    if name == "refuse":
        return send({"id": number, "error": {"code": -32602, "message": "no such argument"}})
    if name == "server_error":
        return send({"id": number, "error": {"code": -32000, "message": "lost"}})
    if name == "meet":
        meeting.wait()
    if name in ("hang", "freeze"):
        return None
    if name == "die":
        print("last words", file=sys.stderr, flush=True)
        os._exit(3)
    picture = [{"type": "image", "data": "AAAA", "mimeType": "image/png"}, {"type": "text", "text": "a cat"}]
    link = {"type": "resource_link", "uri": "file:///x", "name": "x"}
    document = {"type": "resource", "resource": {"uri": "file:///y", "text": "inside", "mimeType": "text/plain"}}
    results = {
        "add": lambda: text(str(arguments["a"] + arguments.get("b", 0))),
        "echo": lambda: text(arguments["text"]),
        "count": lambda: text(str(num_calls)),
        "env": lambda: text(json.dumps(dict(os.environ))),
        "pid": lambda: text(str(os.getpid())),
        "meet": lambda: text("met"),
        "fail": lambda: text("it does not work", is_error=True),
        "picture": lambda: {"content": [*picture, link, document]},
    }
    return send({"id": number, "result": results[name]()})


def listed(cursor):
    start = int(cursor or 0)
    tools = [{"name": n, "description": f"Tool {n}.", "inputSchema": s} for n, s in TOOLS.items()]
    more = {"nextCursor": str(start + PAGE)} if start + PAGE < len(tools) else {}
    return {"tools": tools[start : start + PAGE], **more}


def main():
    if "broken" in sys.argv:
        sys.exit("no such module")
    if "silent" in sys.argv:
        time.sleep(1000)
    for line in sys.stdin:
        message = json.loads(line)
        method, params, number = message.get("method"), message.get("params") or {}, message.get("id")
        print("working", file=sys.stderr, flush=True)
        if method == "initialize":
            info = {"name": "test", "version": "1"}
            result = {"protocolVersion": params["protocolVersion"], "capabilities": {"tools": {}}, "serverInfo": info}
            send({"id": number, "result": result})
        elif method == "tools/list":
            send({"id": number, "result": listed(params.get("cursor"))})
        elif method == "tools/call":
            if params["name"] == "freeze":
                frozen.set()  # before the next message is read
            threading.Thread(target=call, args=(params["name"], params["arguments"] or {}, number), daemon=True).start()
        elif number is not None:
            send({"id": number, "result": {}})


if __name__ == "__main__":
    main()
