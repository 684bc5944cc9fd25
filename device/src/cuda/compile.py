"""Compiles a CUDA source to PTX with the NVRTC of the package nvidia-cuda-nvrtc-cu12; needs no device and no driver.

compile.py SOURCE PTX: the first line of PTX says of which SOURCE it is.
"""

import ctypes
import importlib.util
import pathlib
import sys

# The oldest devices that drivers of CUDA 12 and 13 know: Turing.
ARCHITECTURE = "compute_75"


def library() -> ctypes.CDLL:
    """The compiler, and beside it what it loads by name."""
    spec = importlib.util.find_spec("nvidia.cuda_nvrtc")
    folder = pathlib.Path(next(iter(spec.submodule_search_locations))) / "lib"
    for builtins in folder.glob("libnvrtc-builtins.so*"):
        ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(next(folder.glob("libnvrtc.so*"))))


def text(nvrtc: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> str:
    """One of the program's texts: `PTX` or `ProgramLog`."""
    size = ctypes.c_size_t()
    check(getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size)), what)
    buffer = ctypes.create_string_buffer(size.value)
    check(getattr(nvrtc, f"nvrtcGet{what}")(program, buffer), what)
    return buffer.value.decode()


def check(result: int, what: str) -> None:
    if result != 0:
        sys.exit(f"NVRTC: {what} failed with {result}")


def fnv1a(data: bytes) -> int:
    value = 0xCBF29CE484222325
    for byte in data:
        value = ((value ^ byte) * 0x100000001B3) % (1 << 64)
    return value


def main(source: pathlib.Path, ptx: pathlib.Path) -> None:
    nvrtc = library()
    code, program = source.read_bytes(), ctypes.c_void_p()
    created = nvrtc.nvrtcCreateProgram(ctypes.byref(program), code, source.name.encode(), 0, None, None)
    check(created, "nvrtcCreateProgram")
    options = (ctypes.c_char_p * 1)(f"--gpu-architecture={ARCHITECTURE}".encode())
    if nvrtc.nvrtcCompileProgram(program, 1, options) != 0:
        sys.exit(text(nvrtc, program, "ProgramLog"))
    lines = text(nvrtc, program, "PTX").splitlines()
    # Constants of a header that NVRTC includes by itself; nothing refers to them.
    kept = [line for line in lines if line and not line.startswith("//") and "nv6target" not in line]
    body = "\n".join(kept)
    ptx.write_text(f"// {source.name} {fnv1a(code):016x}\n{body}\n")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]))
