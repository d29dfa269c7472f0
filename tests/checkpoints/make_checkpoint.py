#!/usr/bin/env python3
"""Build a header-only fixture checkpoint from a JSON spec (standard library only).

    make_checkpoint.py SPEC OUTDIR [--experts K] [--variant ID] [--no-check]
    make_checkpoint.py SPEC --list [--experts K] [--variant ID]     (writes nothing)

OUTDIR gets config.json, hf_quant_config.json (when the spec has one),
model.safetensors.index.json and sparse model-XXXXX-of-XXXXX.safetensors shards: the
headers are real, the data regions are holes (truncate), so no disk is taken.

Spec keys
  config, hf_quant_config|null   file contents, written in the order given
  config_inline     keys of config.json whose list stays on one line
  shards            number of shard files
  index_metadata    "metadata" object of the index; total_size "actual" = sum of payload bytes
  index_order       "name" (default) or "shard": order of weight_map keys
  index_extra       [{"name","layers","experts","shard"}] listed in the index, absent from shards
  header_metadata   "__metadata__" of each shard header, or null for none
  header_order      {"SHARD": [names first in that header]}; the rest by dtype rank, then name
  checks            {"tensor_count","payload_bytes","dtype_counts","shard_sizes","header_sha256",
                    "file_bytes","index_bytes","config_sha256"}: published values, verified on a
                    full build
  variants          [{"id","config_set","config_unset","hf_quant_config",
                      "tensors_drop":[regex on the pattern],"tensors_add":[...],"checks"}]
  tensors           [{"name","dtype","shape","layers","experts","shard","basis"}]
      name    may hold {layer} and {expert}
      layers  "0-42", "2-42:2", "1,14" (any comma mix); needed when name holds {layer}
      experts a count (0..n-1) or a range string; needed when name holds {expert}
      shard   1-based number or "L+2" (layer index + 2); when missing, the unplaced tensors are
              spread over the shards in name order, by bytes
"""

import argparse
import hashlib
import json
import os
import re
import struct
import sys

BITS = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}
# safetensors lays tensors out by descending dtype rank, then by name
RANK = {d: i for i, d in enumerate(BITS)}


def ranges(text):
    """'0-3,7,10-20:2' -> [0, 1, 2, 3, 7, 10, 12, ...]"""
    if isinstance(text, int):
        return [text]
    out = []
    for part in str(text).split(","):
        m = re.fullmatch(r"\s*(\d+)(?:-(\d+)(?::(\d+))?)?\s*", part)
        if not m:
            raise ValueError(f"bad range {text!r}")
        lo, hi, step = int(m[1]), int(m[2] or m[1]), int(m[3] or 1)
        out.extend(range(lo, hi + 1, step))
    return out


def nbytes(dtype, shape):
    n = 1
    for d in shape:
        n *= d
    bits = n * BITS[dtype]
    if bits % 8:
        raise ValueError(f"{dtype}{shape} is not a whole number of bytes")
    return bits // 8


def shard_of(rule, layer):
    if rule is None or isinstance(rule, int):
        return rule
    m = re.fullmatch(r"L\+(\d+)", rule)
    if not m or layer is None:
        raise ValueError(f"bad shard rule {rule!r}")
    return layer + int(m[1])


def expand(entry, limit):
    """Yield (name, shard or None) for one pattern."""
    name = entry["name"]
    layers = ranges(entry["layers"]) if "{layer}" in name else [None]
    experts = [None]
    if "{expert}" in name:
        e = entry["experts"]
        experts = list(range(e)) if isinstance(e, int) else ranges(e)
        if limit is not None:
            experts = experts[:limit]
    for layer in layers:
        shard = shard_of(entry.get("shard"), layer)
        base = name if layer is None else name.replace("{layer}", str(layer))
        for expert in experts:
            yield (base if expert is None else base.replace("{expert}", str(expert))), shard


def inventory(spec, limit=None):
    """name -> [dtype, shape, bytes, shard]"""
    out = {}
    for entry in spec["tensors"]:
        size = nbytes(entry["dtype"], entry["shape"])
        for name, shard in expand(entry, limit):
            if name in out:
                raise ValueError(f"{name} is given twice")
            out[name] = [entry["dtype"], entry["shape"], size, shard]
    n = spec["shards"]
    loose = sorted(k for k, v in out.items() if v[3] is None)
    total = sum(out[k][2] for k in loose)
    seen = 0
    for k in loose:
        out[k][3] = min(n, seen * n // total + 1) if total else 1
        seen += out[k][2]
    bad = [k for k, v in out.items() if not 1 <= v[3] <= n]
    if bad:
        raise ValueError(f"shard out of 1..{n}: {bad[:3]}")
    return out


def dotted(obj, path, value=None, unset=False):
    keys = path.split(".")
    for k in keys[:-1]:
        if unset and k not in obj:
            return
        obj = obj.setdefault(k, {})
    if unset:
        obj.pop(keys[-1], None)
    else:
        obj[keys[-1]] = value


def apply_variant(spec, vid):
    for v in spec.get("variants", []):
        if v["id"] == vid:
            break
    else:
        known = ", ".join(v["id"] for v in spec.get("variants", [])) or "none"
        raise SystemExit(f"no variant {vid!r} (known: {known})")
    spec = json.loads(json.dumps(spec))
    spec["variant"] = vid
    for path in v.get("config_unset", []):
        dotted(spec["config"], path, unset=True)
    for path, value in v.get("config_set", {}).items():
        dotted(spec["config"], path, value)
    if "hf_quant_config" in v:
        spec["hf_quant_config"] = v["hf_quant_config"]
    drops = [re.compile(r) for r in v.get("tensors_drop", [])]
    spec["tensors"] = [t for t in spec["tensors"] if not any(r.search(t["name"]) for r in drops)]
    spec["tensors"] += v.get("tensors_add", [])
    if drops or v.get("tensors_add"):
        spec["checks"] = v.get("checks", {})
    for key in ("shards", "index_metadata", "index_order", "index_extra"):
        if key in v:
            spec[key] = v[key]
    return spec


def header_bytes(tensors, metadata=None, first=()):
    """Header of one shard, as the safetensors library writes it; and the payload size."""
    head, at = ({"__metadata__": metadata} if metadata else {}), 0
    place = {name: i for i, name in enumerate(first)}
    for name in sorted(tensors, key=lambda k: (place.get(k, len(place)), -RANK[tensors[k][0]], k)):
        dtype, shape, size, _ = tensors[name]
        head[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    raw = json.dumps(head, separators=(",", ":")).encode()
    return raw + b" " * (-len(raw) % 8), at


def write_json(path, obj, inline=(), end="\n"):
    text = json.dumps(obj, indent=2, ensure_ascii=False)
    for key in inline:  # lists that the published file keeps on one line
        text = re.sub(
            rf'("{re.escape(key)}": )\[\s+([^\]]*?)\s+\]',
            lambda m: m[1] + "[" + re.sub(r",\s+", ", ", m[2]) + "]",
            text,
        )
    with open(path, "w", encoding="utf-8", newline="\n") as f:
        f.write(text + end)


def read_header(path):
    with open(path, "rb") as f:
        (n,) = struct.unpack("<Q", f.read(8))
        return json.loads(f.read(n)), n


def build(spec, out, limit=None):
    inv = inventory(spec, limit)
    n = spec["shards"]
    os.makedirs(out, exist_ok=True)
    for old in os.listdir(out):
        if re.fullmatch(
            r"model-\d{5}-of-\d{5}\.safetensors|model\.safetensors(\.index\.json)?"
            r"|config\.json|hf_quant_config\.json",
            old,
        ):
            os.unlink(os.path.join(out, old))
    write_json(os.path.join(out, "config.json"), spec["config"], spec.get("config_inline", ()))
    if spec.get("hf_quant_config") is not None:
        write_json(os.path.join(out, "hf_quant_config.json"), spec["hf_quant_config"])

    def fname(i):
        return f"model-{i:05d}-of-{n:05d}.safetensors"

    shards = {i: {} for i in range(1, n + 1)}
    for name, row in inv.items():
        shards[row[3]][name] = row
    for i, tensors in shards.items():
        raw, size = header_bytes(
            tensors, spec.get("header_metadata"), spec.get("header_order", {}).get(str(i), ())
        )
        with open(os.path.join(out, fname(i)), "wb") as f:
            f.write(struct.pack("<Q", len(raw)) + raw)
            f.truncate(8 + len(raw) + size)
    where = {name: fname(row[3]) for name, row in inv.items()}
    for entry in spec.get("index_extra", []):
        for name, shard in expand(entry, limit):
            where.setdefault(name, fname(shard))
    names = sorted(where)
    if spec.get("index_order") == "shard":
        names.sort(key=lambda k: where[k])
    meta = dict(spec.get("index_metadata") or {"total_size": "actual"})
    if meta.get("total_size") == "actual":
        meta["total_size"] = sum(r[2] for r in inv.values())
    write_json(
        os.path.join(out, "model.safetensors.index.json"),
        {"metadata": meta, "weight_map": {k: where[k] for k in names}},
        end="",
    )
    return inv


def verify(spec, out, inv):
    """Re-read what was written; returns a list of complaints."""
    bad, seen = [], {}
    with open(os.path.join(out, "model.safetensors.index.json"), encoding="utf-8") as f:
        where = json.load(f)["weight_map"]
    for i in range(1, spec["shards"] + 1):
        name = f"model-{i:05d}-of-{spec['shards']:05d}.safetensors"
        path = os.path.join(out, name)
        head, n = read_header(path)
        head.pop("__metadata__", None)
        at = 0
        for key, t in head.items():
            lo, hi = t["data_offsets"]
            if lo != at or hi - lo != nbytes(t["dtype"], t["shape"]):
                bad.append(f"{name}: {key}: bad offsets")
            at = hi
            seen[key] = name
            if where.get(key) != name:
                bad.append(f"{key}: index says {where.get(key)}, found in {name}")
        if os.path.getsize(path) != 8 + n + at:
            bad.append(f"{name}: wrong file size")
    if set(seen) != set(inv):
        bad.append("tensor set differs from the spec")
    return bad


def check_full(spec, inv, out=None):
    bad, c = [], spec.get("checks", {})
    if c.get("tensor_count") not in (None, len(inv)):
        bad.append(f"{len(inv)} tensors, published {c['tensor_count']}")
    total = sum(r[2] for r in inv.values())
    if c.get("payload_bytes") not in (None, total):
        bad.append(f"{total} payload bytes, published {c['payload_bytes']}")
    count = {}
    for r in inv.values():
        count[r[0]] = count.get(r[0], 0) + 1
    for dtype, want in c.get("dtype_counts", {}).items():
        if count.get(dtype, 0) != want:
            bad.append(f"{count.get(dtype, 0)} {dtype} tensors, published {want}")
    if not out:
        return bad

    def path(i):
        return os.path.join(out, f"model-{int(i):05d}-of-{spec['shards']:05d}.safetensors")

    for i, want in c.get("shard_sizes", {}).items():
        got = os.path.getsize(path(i))
        if got != want:
            bad.append(f"shard {i}: {got} bytes, published {want}")
    for i, want in c.get("header_sha256", {}).items():
        with open(path(i), "rb") as f:
            (n,) = struct.unpack("<Q", f.read(8))
            got = hashlib.sha256(f.read(n)).hexdigest()
        if got != want:
            bad.append(f"shard {i}: header sha256 {got}, published {want}")
    total = sum(os.path.getsize(path(i)) for i in range(1, spec["shards"] + 1))
    if c.get("file_bytes") not in (None, total):
        bad.append(f"{total} bytes in shard files, published {c['file_bytes']}")
    size = os.path.getsize(os.path.join(out, "model.safetensors.index.json"))
    if c.get("index_bytes") not in (None, size):
        bad.append(f"index of {size} bytes, published {c['index_bytes']}")
    want = c.get("config_sha256")
    if want and not spec.get("variant"):
        with open(os.path.join(out, "config.json"), "rb") as f:
            got = hashlib.sha256(f.read()).hexdigest()
        if got != want:
            bad.append(f"config.json sha256 {got}, published {want}")
    return bad


def main(argv=None):
    p = argparse.ArgumentParser(description="Build a header-only fixture checkpoint from a spec.")
    p.add_argument("spec")
    p.add_argument("out", nargs="?", help="directory to write")
    p.add_argument(
        "--experts",
        type=int,
        metavar="K",
        help="emit only the first K experts of each layer (default: all)",
    )
    p.add_argument("--variant", help="apply one of the spec's variants")
    p.add_argument("--list", action="store_true", help="print a summary, write nothing")
    p.add_argument("--no-check", action="store_true", help="skip the checks")
    a = p.parse_args(argv)
    if a.experts is not None and a.experts < 1:
        p.error("--experts must be at least 1")
    if not a.list and not a.out:
        p.error("OUTDIR is needed")
    with open(a.spec, encoding="utf-8") as f:
        spec = json.load(f)
    if a.variant:
        spec = apply_variant(spec, a.variant)
    if a.list:
        inv, bad = inventory(spec, a.experts), []
    else:
        inv = build(spec, a.out, a.experts)
        bad = [] if a.no_check else verify(spec, a.out, inv)
    checked = not a.no_check and a.experts is None
    if checked:
        bad += check_full(spec, inv, None if a.list else a.out)
    count, size = {}, {}
    for dtype, _, b, _ in inv.values():
        count[dtype] = count.get(dtype, 0) + 1
        size[dtype] = size.get(dtype, 0) + b
    print(
        f"{spec['name']}{'@' + a.variant if a.variant else ''}: {len(inv)} tensors, "
        f"{sum(size.values())} payload bytes, {spec['shards']} shards; "
        + ", ".join(f"{d} {count[d]}" for d in sorted(count))
    )
    for line in bad[:20]:
        print("  MISMATCH", line, file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
