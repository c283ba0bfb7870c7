"""The environment of an engine's process on the CPU.

The same program gives the same numbers on every processor only with the same vector instructions: a
sum over wider vectors is taken in another order. AVX2 is what x86-64 processors since 2013 have in
common. MKL takes it from Intel's processors alone; on AMD's it uses what it holds best. In bf16
AVX2 has no arithmetic: such a profile keeps what its processor is fastest at, and its numbers
differ between processors.
"""

from pathlib import Path

CPU_INFO = Path("/proc/cpuinfo")
_AVX2 = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_CBWR": "AVX2,STRICT",  # strict: whatever the number of threads
    "MKL_DYNAMIC": "FALSE",  # as many threads as are asked for, also on fewer cores
}


def cpu_env(threads: int, dtype: str) -> dict[str, str]:
    """What fixes threads and instruction set, for weights of this type; on processors without AVX2
    only threads."""
    # Threads that spin while they wait slow each other down as soon as cores are shared.
    env = {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
    flags = CPU_INFO.read_text(encoding="utf-8", errors="replace") if CPU_INFO.is_file() else ""
    return env | (_AVX2 if dtype == "float32" and " avx2 " in flags else {})
