# SPDX-License-Identifier: Apache-2.0
"""Builds the programs for a GPU with Bazel, here or on another machine, from which they are copied.

Everything that is copied is in one folder, `.test/gpu`: the programs and libsluice.so.0 without debug information, a
stamp of their sources, wheels, and the record of passed items.
"""

import hashlib
import importlib.util
import os
import pathlib
import shutil
import signal
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
OUT = ROOT / ".test" / "gpu"
OUT_FAKE = ROOT / ".test" / "gpu_fake"
MOST_CARRIED = 64 << 20  # the limit of a machine that is lent for minutes
# Packages that `sluice` needs in addition to torch: cdef.py writes its module with cffi, which parses with pycparser.
WHEELS = ("cffi", "pycparser")
SUITE, LAYER, LIBRARY = "gpu_suite", "gpu_layer", "libsluice.so.0"
HASHED = (".c", ".cc", ".cu", ".h", ".inc", ".lds", ".txt", ".sh", ".py", ".cpp", ".bzl", "BUILD", "run")


def targets(fake):
    """Returns {name: Bazel target}."""
    end = "_fake" if fake else ""
    return {
        SUITE + end: f"//backend/cts/gpu:{SUITE}{end}",
        LAYER + end: f"//capi/test/cuda:{LAYER}{end}",
        LIBRARY: f"//capi:{LIBRARY}",
    }


def source_hash():
    """Returns a hash of the sources of the programs and of these scripts."""
    digest = hashlib.sha256()
    for top in ("backend", "capi", "adapters", "python_plugin", "third_party/bazel", "integration_tests/gpu"):
        for path in sorted((ROOT / top).rglob("*")):
            if path.name.endswith(HASHED) and not path.name.startswith("test_") and path.is_file():
                digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def shown(folder):
    return os.path.relpath(folder, ROOT)


def build(out, fake):
    """Builds, and returns the error or None. Does nothing if the same sources are built and the programs start."""
    stamp, now = out / "built", source_hash()
    is_built = stamp.exists() and stamp.read_text() == now
    if is_built and starts(out, fake):
        return None
    if shutil.which("bazel") is None:
        why = (
            "does not start on this machine"
            if is_built
            else "is not of these sources"
            if stamp.exists()
            else "is absent"
        )
        return (
            f"gpu: what should lie built in {shown(out)} {why}, and there is no Bazel here to build it: run "
            "`integration_tests/gpu/run --build` where Bazel is, and carry that folder"
        )
    out.mkdir(parents=True, exist_ok=True)
    stamp.unlink(missing_ok=True)
    wanted = targets(fake)
    problem = run_here("bazel", "build", "--noshow_progress", *wanted.values())
    if problem is not None:
        return problem
    made = pathlib.Path(subprocess.check_output(["bazel", "info", "bazel-bin"], cwd=ROOT, text=True).strip())
    for name, target in wanted.items():
        problem = run_here("objcopy", "--strip-debug", made / target[2:].replace(":", "/"), out / name)
        if problem is not None:
            return problem
        (out / name).chmod(0o755)
    if source_hash() != now:
        return "gpu: sources were edited while they were built: run again"
    stamp.write_text(now)
    return None


def run_here(*command):
    """Runs a command, and returns the error or None."""
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return f"gpu: {command[0]} fails:\n{done.stdout[-3000:].rstrip()}" if done.returncode else None


def starts(out, fake):
    """Returns whether the built programs run here: they may need newer libraries, or have lost their mode bits."""
    load = "import ctypes, sys; ctypes.CDLL(sys.argv[1])"
    commands = [[str(out / name), "--list"] for name in targets(fake) if name != LIBRARY]
    commands.append([sys.executable, "-c", load, str(out / LIBRARY)])
    try:
        for command in commands[:-1]:
            pathlib.Path(command[0]).chmod(0o755)
        return all(run_within(command, None, 60)[0] == 0 for command in commands)
    except OSError:
        return False


def carried_bytes(out=OUT):
    """Returns the bytes of the working tree without ignored files, and of the built files."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.check_output(listed, cwd=ROOT).decode().split("\0")
    files = {ROOT / name for name in names if name} | set(out.rglob("*"))
    return sum(path.stat().st_size for path in files if path.is_file() and not path.is_symlink())


def say_carried(out=OUT):
    """Prints the size, and returns the reason why it cannot be copied, or None."""
    size = carried_bytes(out)
    print(f"gpu: {size / 2**20:.1f} MiB to carry: the working tree and {shown(out)}", flush=True)
    return None if size <= MOST_CARRIED else f"gpu: more than {MOST_CARRIED >> 20} MiB: clear {shown(out)}"


def run_within(command, environment, limit):
    """Runs a command and returns (exit code, text). After a timeout the code is None, and its processes are ended."""
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    ) as child:
        try:
            text, _ = child.communicate(timeout=limit)
            code = child.returncode
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            (text, _), code = child.communicate(), None
    return code, text.decode(errors="replace")


# --- the machine -----------------------------------------------------------------------------------------


def nvidia_folders():
    """Returns the folders of NVIDIA's pip packages for this Python, which have cuBLAS if the toolkit lacks it."""
    found = importlib.util.find_spec("nvidia")
    return [pathlib.Path(p) for p in found.submodule_search_locations] if found is not None else []


def find_tool(name):
    """Finds compute-sanitizer or ncu on PATH, or in a toolkit."""
    for path in (shutil.which(name), f"/usr/local/cuda/bin/{name}"):
        if path and os.access(path, os.X_OK):
            return path
    return None


def library_path():
    """Returns LD_LIBRARY_PATH for the programs, which find cuBLAS and the driver by name: the current value, then their
    folders."""
    nvcc = shutil.which("nvcc")
    places = [pathlib.Path(nvcc).resolve().parent.parent / "lib64"] if nvcc else []
    places += [pathlib.Path("/usr/local/cuda/lib64"), pathlib.Path("/usr/local/nvidia/lib64")]
    places += [lib for folder in nvidia_folders() for lib in sorted(folder.glob("*/lib"))]
    found = [str(place) for place in places if place.is_dir()]
    return ":".join([part for part in (os.environ.get("LD_LIBRARY_PATH"), *found) if part])


# Asks the driver, which needs no build. It returns a CUresult; 100: no device.
ASK_DRIVER = """
import ctypes, sys
try:
    driver = ctypes.CDLL("libcuda.so.1")
except OSError as error:
    sys.exit(f"no NVIDIA driver ({error})")
code, count = driver.cuInit(0), ctypes.c_int(0)
if code == 0:
    code = driver.cuDeviceGetCount(ctypes.byref(count))
if code == 100 or (code == 0 and count.value == 0):
    sys.exit("an NVIDIA driver that sees no GPU")
if code != 0:
    sys.exit(f"an NVIDIA driver that does not start (CUresult {code})")
"""


def why_no_gpu():
    """Returns the reason why this machine has no usable GPU, or None."""
    environment = {**os.environ, "LD_LIBRARY_PATH": library_path()}
    code, text = run_within([sys.executable, "-c", ASK_DRIVER], environment, 60)
    if code is None:
        return "an NVIDIA driver that does not answer within a minute"
    return text.strip() if code != 0 else None


# --- wheels -------------------------------------------------------------------------------------------------------


def fetch_wheels(python, out=OUT):
    """Downloads wheels into the copied folder. pip takes platforms literally, so old and new names are listed."""
    platforms = ["manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64"]
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "-d", str(out / "wheels")]
    command += ["--python-version", python, "--implementation", "cp"]
    command += [word for platform_name in platforms for word in ("--platform", platform_name)]
    pins = (ROOT / "third_party/setup/requirements.txt").read_text().split("\n")
    return subprocess.run([*command, *(pin for pin in pins if pin.split("==")[0] in WHEELS)]).returncode


def unpack_wheels(out):
    """Unpacks the wheels that this Python lacks into a folder for PYTHONPATH; returns None if it lacks none."""
    lacking = [name for name in WHEELS if importlib.util.find_spec(name) is None]
    files = [str(path) for name in lacking for path in sorted((out / "wheels").glob(f"{name}-*.whl"))]
    if not files:
        return None
    site = out / "site"
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile", "--upgrade"]
    done = subprocess.run([*command, "--target", str(site), *files], capture_output=True, text=True)
    if done.returncode != 0:
        print(f"gpu: the wheels cannot be unpacked:\n{done.stderr[-2000:]}", flush=True)
        return None
    print(f"gpu: took {', '.join(lacking)} from the wheels", flush=True)
    return site
