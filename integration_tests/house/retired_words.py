"""Words that this project does not use, and what it says instead: one word for one thing, the field's where it has one.

A retired word is looked for in names of any case form (`_ceiling_`, `CEILING`, `Ceilings`), in file names, keys,
options, messages and documents. docs/glossary.md says what the words mean that are used.
"""

import os
import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Retired:
    word: str  # a pattern of one or more parts of a name
    instead: str
    example: str  # a name that is refused
    is_name: bool = False  # refused as part of a longer name only: alone it is an English word
    allowed: str = r"(?!)"  # longer names in which it means something else


WORDS = (
    Retired("parcels?", "token copy, token_copies", "sluice_parcels_t"),
    Retired("ceilings?", "capacity", "SLUICE_EXCHANGE_CEILING"),
    Retired("tall(?:y|ies)", "drop counters, drop_counters", "out_tally"),
    Retired("rivals?", "candidate", "num_rivals"),
    Retired("choosers?", "policy hook, policy_hook (of a gemm: selector)", "sluice_chooser_t"),
    Retired("seats?", "decision state, decision", "moe->seat"),
    Retired("sketch(?:es|ed)?", "bootstrap cost model", "sketch_rates"),
    Retired("exchange_late", "exchange_contention", "exchange_late"),
    Retired("exchange_taken", "compute_contention", "second_exchange_taken"),
    Retired("spill_(?:forward|backward)", "cache_miss_forward, cache_miss_backward", "spill_forward"),
    Retired("burst_seconds", "token_bucket_seconds", "burst_seconds"),
    Retired("patience", "timeout", "--patience"),
    Retired("sluice_released(?:_[a-z]+)?", "sluice_slot_poisoner", "sluice_released_begin"),
    Retired("sluice_kept(?:_(?!decisions)[a-z]+)?", "sluice_replay", "sluice_kept_forward_t", False,
            r"sluice_kept_decisions"),
    Retired("chunk_cuts?", "chunking", "chunk_cut"),
    Retired("cuts?_rows", "chunks_by_experts", "sluice_cut_rows_order"),
    Retired("sluice_cut", "sluice_chunks_by_tokens", "sluice_cut_add", False, r"sluice_cut_order"),
    Retired("tapers?", "uneven chunks, uneven_chunks", "sluice_taper_share"),
    Retired("envelopes?", "header", "ENVELOPE_BYTES"),
    Retired("sluice_agree", "sluice_handshake", "sluice_agree"),
    Retired("agreements?", "handshake", "sluice_agreement_t"),
    Retired("wire_memory", "registered buffers, registered_buffers", "sluice_wire_memory_open"),
    Retired("(?:restore|saved|host|policy[._]|pool)_?middle", "pre_activation", "restore_middle"),
    Retired("restore_di", "restore_input", "restore_di"),
    Retired("restore_m", "restore_pre_activation", "restore_m"),
    Retired("place_of_expert", "expert_position", "place_of_expert"),
    Retired("first_place", "first_position", "first_place"),
    Retired("products?", "gemm, gemms (types: sluice_gemm_problem_t, sluice_grouped_gemm_t)", "product_bytes", True,
            r"scaled_dot_product_attention"),
    Retired("matrix products?", "GEMM, GEMMs", "matrix products"),
    Retired("far", "on_device_memory, device_..., ..._on_device", "shape.is_far", True,
            r"so_far|far_longer|farther|as_?far_?from|by_far"),
    Retired("far devices?", "device memory; a device with memory of its own", "a far device"),
    Retired("told_failure", "pending_failure", "told_failure"),
    Retired("budget_words", "budget_messages", "sluice_budget_words_t"),
    Retired("provenance\\W{1,8}fitted", "provenance \"refined\"", 'provenance": "fitted'),
)  # fmt: skip

# Where old words stay, with the reason.
EXEMPT = {
    r"integration_tests/house/(test_)?retired_words\.py": "they list the words",
    r"integration_tests/digest/(?!compare\.py)": "the words of its calls are its own",
    r"third_party/vendor/": "others' words",
    r"capi/abi/baseline\.abi": "written by a tool, from names that are looked at where they stand",
}
TEXT = (
    ".c",
    ".h",
    ".cc",
    ".cpp",
    ".cu",
    ".inc",
    ".py",
    ".md",
    ".sh",
    ".txt",
    ".json",
    ".toml",
    ".ini",
    ".bzl",
    ".lds",
    ".rs",
    ".f90",
)
NAMES = ("BUILD", "WORKSPACE", "test", "quickstart", "run")


def _forms(row):
    """Between parts of a name, in any case; or as a part of a name in capitals, where it is one word."""
    found = rf"(?<![A-Za-z0-9])(?i:{row.word})(?![A-Za-z0-9])"
    if re.fullmatch(r"[a-z]+(s\?|\(\?:[a-z|]+\))?", row.word):
        found += rf"|(?<=[a-z0-9]){row.word[0].upper()}{row.word[1:]}(?![a-z])"
        found += rf"|(?<![A-Za-z]){row.word[0].upper()}{row.word[1:]}(?=[A-Z])"
    return re.compile(found)


def _stem(word):
    """Letters that every name of a pattern has: a search for them takes a hundredth of the pattern's time."""
    plain, before = word, None
    while plain != before:
        plain, before = re.sub(r"\([^()]*\)[?]?", "|", plain), plain
    return max(re.findall("[a-z_ ]+", re.sub(r"[a-z_]\?|\\W", "|", plain)), key=len)


PATTERNS = [(row, _stem(row.word), _forms(row), re.compile(row.allowed, re.IGNORECASE)) for row in WORDS]


def _whole(line, match):
    """The name that a match is part of."""
    begin = match.start()
    while begin > 0 and (line[begin - 1].isalnum() or line[begin - 1] in "_"):
        begin -= 1
    end = match.end()
    while end < len(line) and (line[end].isalnum() or line[end] in "_"):
        end += 1
    return line[begin:end]


def _is_member(line, match):
    """`x->far`, `.far =`: a name of one word."""
    return re.search(r"(->|[\w)\]]\.|^\s*\.|[{,(]\s*\.)$", line[: match.start()]) is not None


def found(text):
    """(line, name, what to say instead) of each retired word in a text."""
    lowered = text.lower()
    patterns = [each for each in PATTERNS if each[1] in lowered]
    for number, line in enumerate(text.splitlines() if patterns else [], 1):
        lowered = line.lower()
        for row, stem, pattern, allowed in patterns:
            if stem not in lowered:
                continue
            for match in pattern.finditer(line):
                name = _whole(line, match)
                is_alone = name.lower() == match.group().lower()
                if allowed.search(name) or (row.is_name and is_alone and not _is_member(line, match)):
                    continue
                if line[: match.start()].endswith(("itertools.", "iter().")):
                    continue
                yield number, name, row.instead


def in_path(path):
    """The same of a file's name."""
    return [(0, name, instead) for _, name, instead in found(os.path.basename(path).replace(".", " "))]


def is_looked_at(path):
    """Whether a file is one that the words are refused in."""
    if any(re.match(pattern, path) for pattern in EXEMPT):
        return False
    return path.endswith(TEXT) or os.path.basename(path) in NAMES
