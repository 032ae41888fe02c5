"""Time `zckpt reshard` of a pipeline, dealt to other stages and ranks, against a plain copy.

    python bench/pipeline.py [--repeat N] [--work DIR] [--width N]

The checkpoint is that of bench/consolidate.py, its layers named and dealt as DeepSpeed's PipelineModule has them: 300M
parameters in 2 stages of 4 ranks, 4.2 GB. Measured as in bench/reshard.py. Exit 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from contest import HERE, Target, Timing, clear, make_checkpoint, run, table, touch_memory, verdict

LAYERS = 12  # of the model of bench/checkpoint.py
STAGES, RANKS = 2, 4
MORE_STAGES, FEWER_RANKS = 4, 3

# The targets.
COPY_RATIO = 1.15  # reshard / (cp + sync), at most
PEAK_MB = 200.0

DEALT = ["--partition-method", "uniform", "--pipeline-layers", f"Embedding,Block*{LAYERS},LayerNorm,Head"]


def make_pipeline(work: Path, width: int | None) -> Path:
    """Return the pipeline's run directory, made on first use."""
    pipeline = work / ("pipeline" if width is None else f"pipeline-{width}")
    if not (pipeline / "latest").exists():
        source = make_checkpoint(work, width)
        names = {"transformer.w*": "0.w*", "transformer.ln_f.*": f"{LAYERS + 1}.*", "value_head.*": f"{LAYERS + 2}.*"}
        names |= {f"transformer.h.{layer}.*": f"{layer + 1}.*" for layer in range(LAYERS)}
        renames = [word for old, new in names.items() for word in ("--rename", f"{old}={new}")]
        degrees = ["--stage", "1", "--world-size", str(RANKS), "--pipeline-parallel-size", str(STAGES), *DEALT]
        program = [sys.executable, "-m", "zckpt", "convert", "--quiet", "--to", "deepspeed"]
        run([*program, *degrees, *renames, str(source), str(pipeline)])
    return pipeline


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--repeat", type=int, default=6, help="turns (default: 6)")
    parser.add_argument("--work", type=Path, default=HERE / "cache", help="folder for 17 GB (default: bench/cache)")
    parser.add_argument("--width", type=int, help="of a narrower model, to try this program (default: 1280)")
    arguments = parser.parse_args()
    work = arguments.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    pipeline, targets = make_pipeline(work, arguments.width), work / "targets"
    script = 'cp -r "$1" "$2" && find "$2" -type f -exec sync {} +'
    degrees = ["--world-size", str(FEWER_RANKS), "--pipeline-parallel-size", str(MORE_STAGES), *DEALT]
    reshard = [sys.executable, "-m", "zckpt", "reshard", "--quiet", *degrees, str(pipeline)]
    commands = {
        "cp + sync": ["sh", "-c", script, "sh", str(pipeline), str(targets / "copied")],
        "reshard": [*reshard, str(targets / "resharded")],
    }
    timings = {name: Timing() for name in commands}
    touch_memory()
    try:
        for turn in range(arguments.repeat):
            print(f"turn {turn + 1} of {arguments.repeat}", file=sys.stderr)
            for name in [*commands][:: 1 if turn % 2 else -1]:
                clear(targets)
                targets.mkdir()
                run(commands[name], timings[name])
    finally:
        clear(targets)
    ratio = timings["reshard"].median / timings["cp + sync"].median
    found = [
        Target("reshard / cp + sync", ratio, COPY_RATIO),
        Target("reshard, peak MB", timings["reshard"].peak, PEAK_MB),
    ]
    print(f"source: {sum(path.stat().st_size for path in pipeline.rglob('*') if path.is_file()) / 1e6:.1f} MB")
    print(f"\n{table(timings, 'cp + sync')}\n\n{verdict(found)}")
    return 0 if all(target.holds for target in found) else 1


if __name__ == "__main__":
    sys.exit(main())
