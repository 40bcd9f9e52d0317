"""What all processes need to be seen from outside: meters, a common clock, traces, exports. No torch, no sockets.

meters.py      numbers that are cheap to count and become Prometheus families when somebody scrapes
compat.py      the same numbers under the names that boards and pickers of other engines read
clock.py       one clock for the processes of a machine, an estimate for those of others
perfetto.py    timelines as a trace for chrome://tracing and Perfetto
draw.py        timelines in a terminal
trace.py       spans for OpenTelemetry, where that is installed and wanted
reference.py   docs/metrics.md, made of the meters
"""
