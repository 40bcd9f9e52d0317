"""Known failures of what lives and does not get on: steps, ranks, workers, copies."""

from __future__ import annotations

from slipstream.doctor.symptoms.symptom import symptom

SYMPTOMS = (
    symptom(
        "worker-hung",
        "A worker hung and ended itself",
        "this worker hangs:",
        "ended with exit code 71: it hung",
        "was ended by SIGALRM",
        cause="a step, one of its threads or a rank did not get on for longer than --step-timeout-s: a kernel or a "
        "collective that deadlocked, a GPU that has failed, a rank that was stopped, or a step that was merely slow; "
        "the line names what, and the stacks below it show where",
        remedies=(
            "look for Xid in dmesg, and for the first rank that the line names",
            "run with NCCL_DEBUG=INFO where ranks wait for each other",
            "if the step was honest: a larger --step-timeout-s, or a smaller --chunk-tokens",
        ),
        effect_of=("gpu-lost", "gpu-hangs", "rank-silent"),
    ),
    symptom(
        "rank-silent",
        "A rank of a worker did not answer",
        "has not shown a sign of life",
        "another rank of this worker has been silent for {n} s",
        "of this worker has taken no orders for {n} s",
        cause="its process is stopped, starved of CPU, or stuck in a call of a device; the line says what it is doing",
        remedies=(
            "see what stopped it (a debugger, SIGSTOP, a frozen cgroup), or took its CPU",
            "look for Xid in dmesg: a rank in a call of the kernel waits for its device",
        ),
    ),
    symptom(
        "worker-silent",
        "A worker or router lived and answered nothing",
        "it has answered none of {n} heartbeats",
        "has answered nothing for {n} s",
        cause="its process is stopped, or starved of CPU or memory, or native code keeps its interpreter; its requests "
        "went on elsewhere, and `serve` starts it again",
        remedies=(
            "see what stopped it (a debugger, SIGSTOP, a frozen cgroup), or whether the machine swaps",
            "if it was merely slow: a larger --worker-silence-s",
        ),
    ),
    symptom(
        "copy-stuck",
        "A copy of KV did not end",
        "has not ended for {n} s (--step-timeout-s)",
        "s after their link has ended; its pages stay taken",
        "of a lost peer runs on",
        cause="the transport neither delivered the copy nor said that it failed: a lost completion, a link that went "
        "down in the middle, a copy that waits for a GPU which hangs",
        remedies=(
            "slipstream doctor --active on both machines, or bench transfer over the same route",
            "another --transport, if it comes again with this one",
            "on a slow network: a larger --step-timeout-s, or a smaller --chunk-tokens",
        ),
        checks="cluster.routes",
    ),
)
