"""The choice of the processor's vector instructions in one process.

    python -m tests.engines.vector_tries

Prints how many kinds of instructions it tried, and the kind that inductor chooses.
"""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

# In place of torch's own, whose headers take the C++ compiler seconds for each kind.
CODE = """
extern "C" void __avx_chk_kernel() {}
"""
tried: list[str] = []


def counted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Have tries, which are Pythons that load what was compiled, noted."""

    def call(command: Any, *args: Any, **kwargs: Any) -> Any:
        if command[0] == sys.executable:
            tried.append(command[-1])
        return function(command, *args, **kwargs)

    return call


def main() -> None:
    subprocess.check_call, subprocess.run = map(counted, (subprocess.check_call, subprocess.run))
    from torch._inductor import config, cpu_vec_isa

    from accbench.engines.inductor import vector_instructions

    cpu_vec_isa.VecISA._avx_code = CODE
    # The tests' own environment lets nothing be tried.
    with config.patch({"cpp.vec_isa_ok": None}):
        vector_instructions.pick()
        print(len(tried), cpu_vec_isa.pick_vec_isa())


if __name__ == "__main__":
    main()
