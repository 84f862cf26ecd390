# SPDX-License-Identifier: Apache-2.0
"""Lists the calls of the digest: combinations of layers and ways to run them, and random families from a seed.

A call is a dict of fields, the members of call_t in call.h; a field that is absent has its default. Calls of one family
have the same layer and inputs, so that their outputs and input gradients agree to the bit. `python3 calls.py` prints
the list, `python3 calls.py --c` the table that the program contains.
"""

import random
import sys

SEED = 20261128
NUM_DRAWN, CALLS_OF_A_FAMILY = 42, 10
TOKENS = (48, 48, 48, 48), (62, 14, 38, 24), (0, 52, 0, 18)
SMALL = (12, 12, 12, 12), (16, 4, 10, 6), (1, 2, 3, 1)  # on the fake device, whose kernels are slow

# Layers, and the ways to run each of them. Fields are separated by spaces; {a|b} expands to each of its parts.
GROUPS = [
    (
        ["ranks=1 tokens=14 activation=gelu gated=halves bias=1 device=cuda dtype={f32|bf16|f16}"],
        [
            "chunks=1",
            "chunks=3 ceiling=14 {wgrad=per_chunk|capture=1}",
            "chunks=2 ceiling=14 capture=1 middle=recompute wgrad=per_chunk",
        ],
    ),
    (
        ["ranks=2 tokens=12,7 width=32 hidden=16 activation=silu gated=interleaved topk=3 device=cuda comm=nccl "
         "dtype={f32|bf16|f16}"],
        [
            "chunks=1",
            "chunks=2 ceiling=12 capture={0|1}",
            "chunks=4 ceiling=12 capture=1 input=redispatch middle=recompute grad_f32=1",
            "chunks=3 input=offload middle=offload",
        ],
    ),
    (
        ["tokens=50 width=64 hidden=96 dtype=f32 activation=silu gated=halves bias=1 gemm=native"],
        [
            "chunks=1",
            "chunks=4 {middle=recompute|threads=2}",
            "chunks=4 input=offload middle=offload wgrad=per_chunk",
            "chunks={0|4} plan=own percent={40|55|100} input=open middle=open",
            "chunks=6 plan=budget percent=130 middle=offload",
        ],
    ),
    (
        ["ranks=2 tokens=21,30 width=24 callback=1 dtype={bf16|f64|f16}"],
        [
            "chunks=1",
            "chunks=5 middle=recompute input=redispatch",
            "chunks=3 middle=recompute outstanding=2 repeat=1",
            "chunks=3 {frozen=x|plan=budget|ceiling=30}",
        ],
    ),
    (
        ["ranks=2 tokens=9,11 width=24 callback=1 device=cuda dtype={bf16|f64|f16}"],
        ["chunks=1", "chunks=4 middle=recompute input=offload", "chunks=2 ceiling=11"],
    ),
    (
        ["ranks=3 tokens=40,12,33 width=40 hidden=56 dtype=bf16 activation=swiglu gated=halves bias=1 gemm=native",
         "ranks=2 tokens=60,41 width=40 hidden=33 dtype=f32 activation=gelu bias=1 gemm=native steps=3",
         "ranks=2 tokens=40,40 width=24 hidden=33 dtype=f64 activation=gelu_tanh gated=halves bias=1 gemm=ref",
         "ranks=4 tokens=30,0,25,50 width=33 hidden=24 dtype=f16 activation=silu gated=interleaved bias=1 gemm=ref "
         "topk=3 hot=7"],
        [
            "chunks=1",
            "chunks={2|5} cut=rows wgrad={deferred|per_chunk}",
            "chunks=4 cut=rows {repeat=1|restore=1|separate_wgrad=1|reuse=1|frozen=params|threads=2|eval=1}",
            "chunks=4 cut=rows outstanding=3 accumulate=1",
            "chunks=5 input=redispatch middle={recompute|offload}",
            "chunks=3 plan=own percent=80 input=open middle=open",
            "chunks=3 grad_f32=1 accumulate={0|1}",
        ],
    ),
    (
        ["ranks=2 tokens=37,21 width=130 hidden=72 activation=relu2 bias=1 gemm={ref|native} deduplicate=1 topk=4"],
        [
            "chunks=1",
            "chunks=4",
            "chunks=4 input=redispatch middle=recompute",
            "chunks=4 input=keep,offload,redispatch,keep middle=recompute,keep,offload,offload frozen=params",
            "chunks=3 restore=1",
            "chunks=2 outstanding=3 repeat=1",
            "chunks=2 eval=1",
            "chunks=4 plan=budget",
            "chunks=4 input=offload middle=recompute threads=2 wgrad=per_chunk",
        ],
    ),
    (
        ["ranks=4 tokens=64,64,64,64 activation=gelu gated=halves bias=1 gemm=ref hot=3"],
        [
            "chunks=1",
            "chunks=8 plan=own percent=45 input=open middle=open",
            "chunks=8 {cut=rows|plan=budget}",
            "chunks=8 plan=budget percent={130|160} {input=redispatch|outstanding=2}",
        ],
    ),
    (
        ["tokens=17 width=33 hidden=26 dtype=f32 gemm=ref api=parts topk=1 hot=2",
         "ranks=2 tokens=17,29 width=33 hidden=26 activation=silu gated=halves bias=1 gemm=native api=parts "
         "drop_every=4",
         "ranks=4 tokens=17,29,0,8 width=33 hidden=26 dtype=bf16 activation=swiglu gated=interleaved gemm=ref "
         "api=parts topk=3 same_every=3",
         "ranks=3 tokens=17,29,0 width=33 hidden=26 dtype=f16 activation=identity bias=1 gemm=native api=parts topk=1 "
         "owners=uneven",
         "ranks=2 tokens=17,29 dtype=f16 activation=relu gated=halves gemm=ref api=parts owners=scattered",
         "ranks=4 tokens=17,29,0,8 dtype=f64 activation=gelu_tanh gated=interleaved bias=1 gemm=ref api=parts topk=3"],
        ["accumulate={0|1}", "grad_f32=1 frozen={w1|w2}"],
    ),
    (
        ["ranks=3 tokens=9,4,9 width=16 hidden=12 activation=swiglu gated=halves bias=1 device=cuda comm=nccl "
         "owners=uneven same_every=2"],
        [
            "chunks=1",
            "chunks=2 ceiling=18 capture={0|1} wgrad=per_chunk",
            "chunks=3 input=redispatch middle=offload",
            "chunks=2 eval=1",
        ],
    ),
    (
        ["ranks=2 tokens=9,9 width=16 hidden=12 dtype=bf16 activation=relu device=cuda comm=nccl hot=5 chunks=2 "
         "ceiling=3"],
        ["capture={0|1}"],
    ),
    (
        ["ranks=2 tokens=40,33 width=16 hidden=52 activation=gelu gated=halves bias=1 gemm=ref same_every=2 topk=3",
         "ranks=2 tokens=40,33 width=16 callback=1 gemm=ref topk=3 deduplicate=1",
         "ranks=3 tokens=30,31,25 width=64 dtype=bf16 callback=1 gemm=native topk=3"],
        ["chunks=1", "chunks=4 input=redispatch middle=recompute", "chunks=3 {plan=budget|eval=1|repeat=1}"],
    ),
]  # fmt: skip


def expanded(text):
    """Yields the expansions of each {a|b} in the text."""
    start, brace, rest = text.partition("{")
    if not brace:
        return [text]
    parts, _, end = rest.partition("}")
    return [tail for part in parts.split("|") for tail in expanded(start + part + end)]


def fields(text):
    return dict(word.split("=", 1) for word in text.split())


def products():
    """Yields (layer, ways to run it) of each group."""
    for layers, ways in GROUPS:
        for layer in (each for text in layers for each in expanded(text)):
            yield fields(layer), [fields(way) for text in ways for way in expanded(text)]


# ---- drawn ---------------------------------------------------------------------------------------------------------


def drawn_layer(draw):
    """Draws a layer and its inputs. Combinations that the library rejects are not drawn."""
    on_device = draw.random() < 0.5
    ranks = draw.randint(1, 4)
    tokens = draw.choice(SMALL if on_device else TOKENS)[:ranks]
    call = {"ranks": ranks, "tokens": ",".join(map(str, tokens))}
    for name, values in {
        "width": (1, 11, 16, 24, 32, 70),
        "hidden": (1, 9, 19, 64, 133),
        "dtype": ("f32", "bf16", "f16", "f64"),
        "activation": ("identity", "relu", "gelu", "gelu_tanh", "silu", "relu2", "swiglu"),
        "gated": ("no", "halves", "interleaved"),
        "bias": (0, 1),
        "transposed": (0, 1),
        "ids32": (0, 1),
        "steps": (1, 3),
        "topk": (1, 2, 3, 12),
        "owners": ("even", "uneven", "scattered"),
    }.items():
        call[name] = draw.choice(values)
    if call["activation"] == "swiglu" and call["gated"] == "no":
        call["gated"] = "halves"
    if on_device:
        call |= {"device": "cuda", "comm": draw.choice(("local", "nccl")) if ranks > 1 else "local"}
    else:
        call["gemm"] = "ref" if call["dtype"] == "f64" else draw.choice(("ref", "native"))
    if ranks > 1 and draw.random() < 0.4:
        call["deduplicate"] = 1
    routes = ["drop_every=5", "drop_every=1", ""] + ["hot=11", "same_every=3"] * (call["topk"] < 12)
    return call | fields(draw.choice(routes))


def drawn_way(draw, layer):
    """Draws one way to run a layer."""
    chunks = draw.choice((1, 2, 3, 4, 7, 12))
    plans = ("none",) if "same_every" in layer else ("none", "own", "budget")  # plans count distinct experts of a token
    call = {"chunks": chunks, "plan": draw.choice(plans)}
    kinds = {"input": ("keep", "offload", "redispatch"), "middle": ("keep", "offload", "recompute")}
    form = draw.choice(("one", "one", "one", "list", "open"))
    for name, values in kinds.items():
        call[name] = draw.choice(values)
        if form == "list" and chunks > 1:
            call[name] = ",".join(draw.choice(values) for _ in range(chunks))
        elif form == "open" and call["plan"] == "own":
            call[name] = "open"
    if call["input"] == "open":
        call["percent"] = draw.choice((95, 100))
        call["chunks"] = draw.choice((0, chunks))
    elif call["plan"] == "budget":
        call["percent"] = draw.choice((160, 250))
    for name, values in {
        "wgrad": ("deferred", "per_chunk"),
        "accumulate": (0, 1),
        "grad_f32": (0, 1),
        "outstanding": (1, 2, 3),
        "eval": (0, 0, 0, 1),
    }.items():
        call[name] = draw.choice(values)
    again = draw.choice(("", "repeat=1", "restore=1") if call["eval"] == 0 else ("", "repeat=1"))
    call |= fields(again)
    call["outstanding"] = 1 if again == "restore=1" else call["outstanding"]
    call |= fields(draw.choice(("", "reuse=1", "separate_wgrad=1")))
    frozen = ["", "routes", "w1", "w2,b1", "x,routes"]
    frozen += ["x", "params"] * ("separate_wgrad" not in call) + ["w3,b3,b2"] * (layer["gated"] == "halves")
    frozen = draw.choice(frozen)
    if frozen:
        call["frozen"] = frozen
    if "device" not in layer and draw.random() < 0.4:
        call["threads"] = 2
    if "deduplicate" not in layer and call["chunks"] and draw.random() < 0.3:
        routes = layer["topk"] if "same_every" in layer else 1  # of a token to one expert
        call["ceiling"] = max(1, *map(int, f"1,{layer['tokens']}".split(","))) * routes  # no row exceeds it
    return call


def drawn():
    """Yields the families of the seed; the first call of each keeps everything in one chunk."""
    draw = random.Random(SEED)
    for _ in range(NUM_DRAWN):
        layer = drawn_layer(draw)
        yield layer, [{"chunks": 1}, *(drawn_way(draw, layer) for _ in range(CALLS_OF_A_FAMILY - 1))]


def calls():
    """Returns every call by id, with its fields as text."""
    found = {}
    for letter, families in (("p", products()), ("d", drawn())):
        for number, (layer, ways) in enumerate(families):
            family = f"{letter}{number:02}"
            for index, way in enumerate(ways):
                call = {"id": f"{family}.{index}", "family": family, "seed": 100 + number, **layer, **way}
                found[call["id"]] = {name: str(value) for name, value in call.items()}
    return found


def line(call):
    return " ".join(f"{name}={value}" for name, value in call.items())


# ---- as C ----------------------------------------------------------------------------------------------------------

DEFAULTS = fields(
    "ranks=1 width=11 hidden=19 experts=12 topk=2 activation=gelu threads=1 chunks=1 input=keep middle=keep "
    "percent=100 outstanding=1 steps=1 hot=-1 seed=1"
)
# Fields whose values are words: the prefix of their enumerators in call.h.
WORDS = {"dtype": "", "activation": "", "gated": "GATE_", "device": "ON_", "gemm": "GEMM_", "comm": "COMM_"}
WORDS |= {"cut": "CUT_", "wgrad": "WGRAD_", "plan": "PLAN_", "api": "API_", "owners": "OWNERS_"}


def value_in_c(name, value):
    if name in ("id", "family", "frozen"):
        return f'"{value}"'
    if name in ("input", "middle"):
        return f"{{{value.count(',') + 1}, {{{value.upper()}}}}}"
    if name == "tokens":
        return f"{{{value}}}"
    return WORDS[name] + ("NONE" if value == "no" else value.upper()) if name in WORDS else value


def table():
    """Returns the text of listed.h, which digest.c includes."""
    lines = []
    for call in calls().values():
        members = (f".{name} = {value_in_c(name, value)}" for name, value in {**DEFAULTS, **call}.items())
        lines.append(f"    {{{', '.join(members)}}},")
    return "\n".join(["static const call_t listed[] = {", *lines, "};", ""])


if __name__ == "__main__":
    print(table() if "--c" in sys.argv else "\n".join(map(line, calls().values())))
