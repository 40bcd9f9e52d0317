"""What this machine is made of, and which way data should take through it.

`probe` reads the running system (or a recorded tree of it), `read` reads what people paste from the usual tools;
both end in one `graph.Machine`. `usable` says which network ports can really carry data and keeps every reason,
`choose` ranks the paths between GPUs and to the network, `report` and `draw` show it. Nothing here imports torch,
needs root, or waits for a device longer than its time limit.
"""
