# SPDX-License-Identifier: Apache-2.0
"""Compiles the kernels with the compiler of CUDA 12.9 from pip, which is a library (NVRTC) without nvcc.

    nvrtc_fatbin.py FLAGS SOURCE OUT LIBRARY_FOLDER     FLAGS: nvcc_flags.txt; includes are relative to the working
    folder

The libraries are those of third_party/setup/requirements-nvrtc.txt; LIBRARY_FOLDER is the `nvidia` folder that pip
creates. Drivers from R525 on load an image of CUDA 12, and one of CUDA 13 from R580 on.
"""

import concurrent.futures
import ctypes
import pathlib
import sys

# NVRTC has no C headers, because its compiler has these functions built in.
HEADERS = {
    "math.h": "",
    "stddef.h": "",
    "string.h": "",
    "stdint.h": "typedef signed char int8_t; typedef short int16_t; typedef int int32_t; typedef long int64_t;\n"
    "typedef unsigned char uint8_t; typedef unsigned short uint16_t; typedef unsigned uint32_t;\n"
    "typedef unsigned long uint64_t; typedef unsigned long uintptr_t;\n"
    "#define INT32_MAX 2147483647\n#define UINT32_MAX 4294967295U\n#define INT64_MAX 9223372036854775807L\n"
    "#define INT64_C(x) x##L\n#define UINT64_C(x) x##UL\n",
}
NVRTC, NVFATBIN = "cuda_nvrtc/lib/libnvrtc.so.12", "nvfatbin/lib/libnvfatbin.so.12"
AS_THEY_ARE = ("-std=", "-fmad=")  # flags that NVRTC accepts; it has no -O and makes no fatbin


class Nvrtc:
    def __init__(self, path):
        self.library = ctypes.CDLL(str(path))
        self.library.nvrtcGetErrorString.restype = ctypes.c_char_p

    def call(self, name, *arguments):
        code = getattr(self.library, name)(*arguments)
        if code != 0:
            raise OSError(f"{name}: {self.library.nvrtcGetErrorString(code).decode()}")

    def result(self, program, what):
        size = ctypes.c_size_t()
        self.call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value)
        self.call(f"nvrtcGet{what}", program, text)
        return text.raw

    def compile(self, source, code, flags):
        """A cubin for sm_N, PTX for compute_N."""
        return self.compile_with_log(source, code, flags)[0]

    def compile_with_log(self, source, code, flags):
        program = ctypes.c_void_p()
        names, texts = ([word.encode() for word in words] for words in (HEADERS, HEADERS.values()))
        array = ctypes.c_char_p * len(names)
        text = pathlib.Path(source).read_bytes()
        self.call(
            *("nvrtcCreateProgram", ctypes.byref(program), text, source.encode()),
            *(len(names), array(*texts), array(*names)),
        )
        options = [option.encode() for option in (*flags, f"-arch={code}", "-I.")]
        try:
            self.call("nvrtcCompileProgram", program, len(options), (ctypes.c_char_p * len(options))(*options))
        except OSError as error:
            raise SystemExit(f"{source} for {code}: {error}\n{self.result(program, 'ProgramLog').decode()}") from error
        made = self.result(program, "CUBIN" if code.startswith("sm_") else "PTX")
        log = self.result(program, "ProgramLog").rstrip(b"\0").decode()
        self.call("nvrtcDestroyProgram", ctypes.byref(program))
        return made, log


def fatbin(path, parts):
    """One image of [(sm_N or compute_N, bytes)]."""
    library, handle, size = ctypes.CDLL(str(path)), ctypes.c_void_p(), ctypes.c_size_t()
    library.nvFatbinGetErrorString.restype = ctypes.c_char_p

    def call(name, *arguments):
        code = getattr(library, name)(*arguments)
        if code != 0:
            raise SystemExit(f"{name}: {library.nvFatbinGetErrorString(code).decode()}")

    options = [b"-64", b"-host=linux", b"-compress-all"]
    call("nvFatbinCreate", ctypes.byref(handle), (ctypes.c_char_p * len(options))(*options), len(options))
    for code, data in parts:
        number, kind = code.split("_")[1].encode(), "Cubin" if code.startswith("sm_") else "PTX"
        more = [None] if kind == "PTX" else []
        call(f"nvFatbinAdd{kind}", handle, data, ctypes.c_size_t(len(data)), number, b"sluice_kernels", *more)
    call("nvFatbinSize", handle, ctypes.byref(size))
    image = ctypes.create_string_buffer(size.value)
    call("nvFatbinGet", handle, image)
    call("nvFatbinDestroy", ctypes.byref(handle))
    return image.raw


def main():
    flags_file, source, out, folder = sys.argv[1:]
    words = pathlib.Path(flags_file).read_text().split()
    flags = [word for word in words if word.startswith(AS_THEY_ARE)]
    codes = [word.rpartition("=")[2] for word in words if word.startswith("-gencode=")]
    nvrtc = Nvrtc(pathlib.Path(folder) / NVRTC)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        made = list(pool.map(lambda code: nvrtc.compile(source, code, flags), codes))
    image = fatbin(pathlib.Path(folder) / NVFATBIN, zip(codes, made))
    pathlib.Path(out).write_bytes(image)


if __name__ == "__main__":
    main()
