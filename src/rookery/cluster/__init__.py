"""Run the runner processes of one engine on many machines (nodes).

- `agent` is the program that starts runners on one node. Its part `token_sender` sends token files.
- `collector` is the program that receives the nodes' token files and writes them into the run's directory.
- `node_pool` runs in the supervisor: it accepts the nodes, watches them and places attempts (`placement`).
- `launchers` start one agent per node: on this machine (`local`), or on a Ray cluster (`ray`).

`docs/guides/cluster.md` describes the mechanism.
"""
