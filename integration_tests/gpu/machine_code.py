# SPDX-License-Identifier: Apache-2.0
"""Reads the compiled machine code of each kernel: registers, stack, spills, and the hot loop's instructions, calls and
accesses.

A kernel's loops are the natural loops of its machine code: a branch back to a block that dominates it. Its hot loop
is, among the innermost loops, the one with the widest load from global memory; among equals the one that loads the
most bytes per iteration, then the one that stores the most, then the longest. So it is the path of large rows.
"""

import collections
import hashlib
import importlib.metadata
import os
import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
KERNELS = ROOT / "backend/device/cuda/kernels"
COMPILERS = ("nvidia-cuda-nvrtc-cu12", "nvidia-cuda-nvdisasm")
BUDGETS = pathlib.Path(__file__).with_name("machine_code.txt")
COUNTS = ("registers", "stack", "spilled", "instructions", "calls")  # all "at most"; stack and spilled in bytes

Kernel = collections.namedtuple("Kernel", (*COUNTS, "loads", "stores"))  # loads and stores: {bits: number}
Instruction = collections.namedtuple("Instruction", ("predicated", "opcode", "operands", "labels"))


def compile_kernels(source, arch):
    """Returns (cubin, ptxas's output) of a file of kernels, compiled as for the image by set-up's compiler."""
    sys.path.insert(0, str(KERNELS))
    try:
        import nvrtc_fatbin
    finally:
        sys.path.remove(str(KERNELS))
    words = (KERNELS / "nvcc_flags.txt").read_text().split()
    flags = [word for word in words if word.startswith(nvrtc_fatbin.AS_THEY_ARE)]
    nvrtc = nvrtc_fatbin.Nvrtc(installed() / nvrtc_fatbin.NVRTC)
    return nvrtc.compile_with_log(source, arch, [*flags, "--ptxas-options=-v", f"-I{ROOT}"])


def installed():
    return next(ROOT.glob(".venv/lib/python3*/site-packages/nvidia"))


def disassemble(cubin):
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([installed() / "cu13/bin/nvdisasm", "-c", file.name], capture_output=True, text=True)
    if done.returncode != 0:
        raise OSError(f"nvdisasm: exit {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def kernels_of(source, arch):
    """Returns {name: Kernel} of a file of kernels, cached in .test by a hash of all inputs: compilers take a minute."""
    made_of = hashlib.sha256(f"{arch} {[importlib.metadata.version(name) for name in COMPILERS]}".encode())
    files = sorted(path for path in KERNELS.iterdir() if path.is_file())  # Python may keep bytecode there
    for path in (pathlib.Path(__file__), *files, pathlib.Path(source)):
        made_of.update(f"{path.name} {path.stat().st_size} ".encode() + path.read_bytes())
    kept = ROOT / ".test" / "machine_code" / made_of.hexdigest()
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        new = kept.with_suffix(f".{os.getpid()}")
        new.write_text("\n".join(line_of(arch, *each) for each in read(source, arch).items()))
        new.rename(kept)
    return read_budgets(kept.read_text(), arch)


def read(source, arch):
    """Compiles, and returns {name: Kernel}."""
    cubin, log = compile_kernels(source, arch)
    sizes, codes = sizes_of(log), functions_of(disassemble(cubin))
    if not sizes or sizes.keys() != codes.keys():
        raise ValueError(f"ptxas speaks of {sorted(sizes)}, nvdisasm of {sorted(codes)}")
    return {name: Kernel(*sizes[name], *measure(codes[name])) for name in sizes}


def sizes_of(log):
    """Returns {name: (registers, bytes of stack, bytes spilled: stored and loaded)} from `ptxas -v`."""
    pattern = re.compile(
        r"Compiling entry function 'sluice_(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, "
        r"(\d+) bytes spill loads.*?Used (\d+) registers",
        re.DOTALL,
    )
    return {m[1]: (int(m[5]), int(m[2]), int(m[3]) + int(m[4])) for m in pattern.finditer(log)}


def functions_of(text):
    """Returns {name: [Instruction]} from nvdisasm. An instruction's labels are those before it."""
    found, here, labels = {}, None, []
    for line in text.split("\n"):
        if match := re.match(r"\s*\.section\s+\.text\.sluice_(\w+),", line):
            here, labels = found.setdefault(match[1], []), []
        elif re.match(r"\s*\.section\s", line):
            here = None
        elif here is None:
            continue
        elif match := re.match(r"([.$\w]+):", line):
            labels.append(match[1])
        elif match := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+\s+)?([\w.]+)\s*([^;]*);?(.*)", line):
            here.append(Instruction(match[1] is not None, match[2], match[3] + match[4], labels))
            labels = []
    return found


def successors(code):
    """Returns the successors of each instruction. A call continues at the next instruction, and is not followed."""
    at = {label: i for i, instruction in enumerate(code) for label in instruction.labels}
    meet, result = {}, []  # BSSY names the reconvergence point at which BSYNC waits
    for i, (predicated, opcode, operands, _) in enumerate(code):
        kind, targets = opcode.split(".")[0], [at[t] for t in re.findall(r"\.L_x_\d+", operands) if t in at]
        ends = kind in ("BRA", "BRX", "JMP", "EXIT", "RET", "BSYNC") and not predicated
        barrier = re.match(r"B\d+", operands)
        if kind == "BSSY":
            meet[barrier[0]], targets = targets, []
        elif kind == "BSYNC":
            targets = meet.get(barrier[0], [])
        elif kind not in ("BRA", "BRX", "JMP"):
            targets = []
        if kind in ("BRA", "JMP") and re.match(r"!?U?P\w+,", operands):
            ends = False  # the condition is an operand
        if kind in ("BRA", "BRX", "JMP") and not targets:
            raise ValueError(f"a branch to where? {opcode} {operands}")
        result.append(sorted({*targets, *([] if ends or i + 1 == len(code) else [i + 1])}))
    return result


def loops_of(code):
    """Returns the instructions of each loop as a set, one set per head."""
    after = successors(code)
    order, seen, stack = [], {0}, [(0, iter(after[0]))]
    while stack:
        for j in stack[-1][1]:
            if j not in seen:
                seen.add(j)
                stack.append((j, iter(after[j])))
                break
        else:
            order.append(stack.pop()[0])
    order.reverse()
    rank = {i: r for r, i in enumerate(order)}
    before = collections.defaultdict(list)
    for i in order:
        for j in after[i]:
            before[j].append(i)
    over = {0: 0}  # the immediate dominator (Cooper, Harvey, Kennedy)

    def common(a, b):
        while a != b:
            while rank[a] > rank[b]:
                a = over[a]
            while rank[b] > rank[a]:
                b = over[b]
        return a

    changed = True
    while changed:
        changed = False
        for i in order[1:]:
            known = [j for j in before[i] if j in over]
            new = known[0]
            for j in known[1:]:
                new = common(new, j)
            changed, over[i] = changed or over.get(i) != new, new
    loops = {}
    for i in order:
        for head in after[i]:
            if rank[head] <= rank[i] and common(head, i) == head:
                body, rest = loops.setdefault(head, {head}), [i]
                while rest:
                    if (j := rest.pop()) not in body:
                        body.add(j)
                        rest += before[j]
    return list(loops.values())


def accesses(code, kind):
    """Returns {bits: number} of the accesses to global memory, and of those to memory unknown to the compiler."""
    found = collections.Counter()
    for instruction in code:
        name, *words = instruction.opcode.split(".")
        if name in kind:
            sizes = [int(word.lstrip("US")) for word in words if re.fullmatch(r"[US]?(8|16|64|128|256)", word)]
            found[sizes[0] if sizes else 32] += 1
    return dict(found)


LOADS, STORES = ("LDG", "LD"), ("STG", "ST")


def measure(code):
    """Returns (instructions, calls, loads, stores) of the hot loop, without NOPs; zeros if a kernel has no loop."""
    loops = loops_of(code)
    bodies = [[code[i] for i in sorted(a)] for a in loops if not any(b < a for b in loops)]

    def weight(body):
        loads, stores = accesses(body, LOADS), accesses(body, STORES)
        moved = [sum(bits * n for bits, n in widths.items()) for widths in (loads, stores)]
        return max(loads, default=0), *moved, len(body)

    hot = [i for i in max(bodies, key=weight, default=[]) if i.opcode != "NOP"]
    return len(hot), sum(i.opcode.startswith("CALL") for i in hot), accesses(hot, LOADS), accesses(hot, STORES)


def read_budgets(text, arch):
    """Returns {name: Kernel} of the lines `KERNEL`, then `ARCH COUNTS.. LOADS STORES` of each architecture."""
    found = {}
    for name, *words in (line.split() for line in text.split("\n") if line.strip() and not line.startswith("#")):
        if arch in words:
            numbers = words[words.index(arch) + 1 :][: len(Kernel._fields)]
            found[name] = Kernel(*map(int, numbers[:-2]), *map(read_widths, numbers[-2:]))
    return found


def read_widths(word):
    return {} if word == "-" else {int(bits): int(n) for n, bits in (part.split("x") for part in word.split("+"))}


def write_widths(widths):
    return "+".join(f"{widths[bits]}x{bits}" for bits in sorted(widths)) or "-"


def line_of(arch, name, kernel):
    return " ".join([name, arch, *map(str, kernel[:-2]), *map(write_widths, kernel[-2:])])


def beyond(kernel, budget):
    """Returns the violations of the budget as text. For accesses it compares the numbers of those up to 8, 16, 32 and
    64 bits."""
    found = [f"{name} {value}, budget {most}" for name, value, most in zip(COUNTS, kernel, budget) if value > most]
    for name in ("loads", "stores"):
        have, may = getattr(kernel, name), getattr(budget, name)
        for bits in (8, 16, 32, 64):
            count, most = (sum(n for b, n in widths.items() if b <= bits) for widths in (have, may))
            if count > most:
                found.append(f"{name} of at most {bits} bits {count}, budget {most}")
                break
    return found
