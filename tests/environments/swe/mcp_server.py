"""A small MCP server over stdin and stdout. Runs in sandboxes; standard library only."""

import json
import os
import sys
import time


def answer(identity, result):
    print(json.dumps({"jsonrpc": "2.0", "id": identity, "result": result}), flush=True)


def text(content, failed=False):
    return {"content": [{"type": "text", "text": content}], "isError": failed}


def call_tool(name, arguments):
    if name == "whoami":
        return text(f"{os.getuid()} {os.getcwd()} {os.environ.get('WORD', '')} {os.environ.get('HOME', '')}")
    if name == "flood":
        return text("x" * int(arguments["size"]))
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
    return text(f"bash of the server: {arguments}")


def main():
    mode = sys.argv[1] if len(sys.argv) > 1 else ""
    if mode == "silent":
        time.sleep(600)
    if mode == "crash":
        sys.exit("no such thing")
    if mode == "noise":
        print("hello, this is no JSON", flush=True)
    schema = {"type": "object", "properties": {"size": {"type": "integer"}}}
    tools = [
        {"name": name, "description": f"Does {name}.", "inputSchema": schema}
        for name in ("whoami", "flood", "fails", "die", "hang", "picture", "bash", "odd.name/x")
    ]
    tools[1]["inputSchema"] = {**schema, "required": ["size"]}
    for line in sys.stdin:
        request = json.loads(line)
        method, identity = request.get("method"), request.get("id")
        if method == "initialize":
            version = request["params"]["protocolVersion"]
            info = {"name": "small", "version": "1"}
            answer(identity, {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": info})
        elif method == "tools/list" and mode == "endless":
            answer(identity, {"tools": tools, "nextCursor": "more"})
        elif method == "tools/list":
            answer(identity, {"tools": tools})
        elif method == "tools/call":
            answer(identity, call_tool(request["params"]["name"], request["params"].get("arguments") or {}))
        elif identity is not None:
            answer(identity, {})


main()
