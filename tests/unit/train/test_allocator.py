import platform
import subprocess
import sys
import textwrap

PROGRAM = textwrap.dedent(
    """
    import resource
    import torch
    from tranship.train.allocator import keep_freed_memory

    def faults(times):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(times):
            blocks = [torch.ones(1 << 20) for _ in range(16)] + [torch.ones(12 << 20)]
            del blocks
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    default = faults(3)
    kept = keep_freed_memory()
    print(kept, default, min(faults(3) for _ in range(5)))
    """
)


def test_freed_memory_comes_back_without_page_faults():
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=True)
    kept, default, after = run.stdout.split()
    assert kept == str(platform.libc_ver()[0] == "glibc")
    if kept == "True":
        assert int(after) < int(default) / 20
