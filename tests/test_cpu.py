"""The environment of a process on the CPU: one instruction set for every processor."""

from pathlib import Path

import pytest

from qinglan import cpu

THREADS = {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE"}


@pytest.mark.parametrize(
    ("flags", "dtype", "pinned"),
    [
        ("sse4_2 avx avx2 fma", "float32", True),
        ("sse4_2 avx avx2 avx512f", "float32", True),
        # It would end by an illegal instruction.
        ("sse4_2 avx", "float32", False),
        # AVX2 has no such arithmetic, so it would take many times as long.
        ("sse4_2 avx avx2 fma", "bfloat16", False),
        (None, "float32", False),
    ],
)
def test_the_instruction_set_is_one_that_every_processor_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: str | None, dtype: str, pinned: bool
):
    monkeypatch.setattr(cpu, "CPU_INFO", tmp_path / "cpuinfo")
    if flags is not None:
        cpu.CPU_INFO.write_text(f"flags : {flags} end\n")
    env = cpu.cpu_env(2, dtype)
    assert THREADS.items() <= env.items()
    names = {"ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_CBWR", "MKL_DYNAMIC"}
    assert env.keys() - THREADS.keys() == (names if pinned else set())
