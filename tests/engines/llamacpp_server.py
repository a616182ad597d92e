"""Runs llama.cpp's HTTP server until its standard input is closed: `MODEL.gguf PORT SLOTS CONTEXT`.

Runs in the virtual environment `.peers/venv-llamacpp`, which has llama.cpp as a Python extension module.
"""

import sys

import xllamacpp


def main() -> None:
    model, port, slots, context = sys.argv[1], *map(int, sys.argv[2:])
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.port = port
    params.n_parallel = slots
    params.n_ctx = slots * context
    params.endpoint_metrics = True
    params.endpoint_slots = True
    params.cpuparams.n_threads = 1
    params.cpuparams_batch.n_threads = 1
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
