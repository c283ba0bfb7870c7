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
    # Strict: the same numbers whatever the number of threads.
    "MKL_CBWR": "AVX2,STRICT",
    # As many threads as are asked for, also on fewer cores.
    "MKL_DYNAMIC": "FALSE",
}


def cpu_env(threads: int, dtype: str) -> dict[str, str]:
    """Variables that fix the threads and the instruction set, for weights of this type.

    On processors without AVX2, and in bf16, they fix the threads alone.
    """
    # Threads that spin while they wait slow each other down as soon as cores are shared.
    env = {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
    if dtype == "float32" and _has_avx2():
        env |= _AVX2
    return env


def _has_avx2() -> bool:
    if not CPU_INFO.is_file():
        return False
    return " avx2 " in CPU_INFO.read_text(encoding="utf-8", errors="replace")
