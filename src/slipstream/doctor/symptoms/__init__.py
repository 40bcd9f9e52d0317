"""The catalogue of known failures, causes before effects where they stand in one list."""

from __future__ import annotations

from slipstream.doctor.symptoms import gpu, hangs, machine, network, rdma, transfer
from slipstream.doctor.symptoms.symptom import Symptom

CATALOGUE: tuple[Symptom, ...] = (
    *machine.SYMPTOMS,
    *rdma.SYMPTOMS,
    *gpu.SYMPTOMS,
    *transfer.SYMPTOMS,
    *network.SYMPTOMS,
    *hangs.SYMPTOMS,
)
