"""A small MCP server over stdin and stdout, with the standard library alone: it runs inside of sandboxes."""

import json
import os
import sys
import time


def answer(identity, result):
    print(json.dumps({"jsonrpc": "2.0", "id": identity, "result": result}), flush=True)


def text(said, failed=False):
    return {"content": [{"type": "text", "text": said}], "isError": failed}


def called(name, given):
    if name == "whoami":
        return text(f"{os.getuid()} {os.getcwd()} {os.environ.get('WORD', '')} {os.environ.get('HOME', '')}")
    if name == "flood":
        return text("x" * int(given["size"]))
    if name == "fails":
        return text("it went wrong", True)
    if name == "die":
        sys.stderr.write("last words\n")
        sys.stderr.flush()
        os._exit(7)
    if name == "hang":
        time.sleep(600)
    if name == "picture":
        return {"content": [{"type": "image", "data": "aGk=", "mimeType": "image/png"}]}
    return text(f"bash of the server: {given}")


def main():
    way = sys.argv[1] if len(sys.argv) > 1 else ""
    if way == "silent":
        time.sleep(600)
    if way == "crash":
        sys.exit("no such thing")
    if way == "noise":
        print("hello, this is no JSON", flush=True)
    many = {"type": "object", "properties": {"size": {"type": "integer"}}}
    tools = [
        {"name": name, "description": f"Does {name}.", "inputSchema": many}
        for name in ("whoami", "flood", "fails", "die", "hang", "picture", "bash", "odd.name/x")
    ]
    tools[1]["inputSchema"] = {**many, "required": ["size"]}
    for line in sys.stdin:
        asked = json.loads(line)
        method, identity = asked.get("method"), asked.get("id")
        if method == "initialize":
            version = asked["params"]["protocolVersion"]
            info = {"name": "small", "version": "1"}
            answer(identity, {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": info})
        elif method == "tools/list" and way == "endless":
            answer(identity, {"tools": tools, "nextCursor": "more"})
        elif method == "tools/list":
            answer(identity, {"tools": tools})
        elif method == "tools/call":
            answer(identity, called(asked["params"]["name"], asked["params"].get("arguments") or {}))
        elif identity is not None:
            answer(identity, {})


main()
