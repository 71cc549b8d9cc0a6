#!/usr/bin/env python3
"""Draws the loss of a run whose rank processes are killed, over the loss of an undisturbed run, as an SVG.

    python3 tests/peers/loss_through_kills.py target/release/phalanx runtime/book/src/loss-through-kills.svg --dp_shard_size 2

Both runs are `reproducible`. The script fails unless their losses and exported weights are equal. Needs only Python's standard
library.
"""

import hashlib
import os
import random
import signal
import time

from job import Job, arguments, ranks

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 300, 56, 16, 44, 40


def add(parser):
    parser.add_argument("svg")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=1)


def train(args, overrides, kills):
    """Losses by step, the steps that were reported when a rank was killed, seconds without a step, and the hash of the weights."""
    dice, killed, gaps = random.Random(args.seed), [], []
    with Job(args.phalanx, hidden_size=64, n_layers=4, micro_batch_size=2, more="reproducible: true\n") as job:
        run = job.start("--max_steps", str(args.steps), "--learning_rate", "1e-3", "--warmup_steps", "20", *overrides)
        n_steps = lambda: len(job.steps_ms())
        while run.poll() is None:
            time.sleep(0.01)
            due = (len(killed) + 0.5 + dice.uniform(-0.3, 0.3)) * args.steps / max(kills, 1)
            if len(killed) == kills or n_steps() < due or not ranks(run.pid):
                continue
            before, begin = n_steps(), time.monotonic()
            os.kill(dice.choice(ranks(run.pid)), signal.SIGKILL)
            killed.append(before)
            while run.poll() is None and n_steps() < before + 2:
                time.sleep(0.002)
            gaps.append(time.monotonic() - begin)
        losses = [line["loss"] for line in job.lines("out/metrics.jsonl") if "step_ms" in line]
        with open(f"{job.folder}/out/model/model.safetensors", "rb") as file:
            weights = hashlib.sha256(file.read()).hexdigest()
    assert run.returncode == 0 and len(losses) == args.steps, (run.returncode, len(losses))
    return losses, killed, gaps, weights


def drawing(undisturbed, losses, killed, caption):
    top = max(undisturbed)
    x = lambda step: LEFT + step * (WIDTH - LEFT - RIGHT) / (len(losses) - 1)
    y = lambda loss: TOP + (1 - loss / top) * (HEIGHT - TOP - BOTTOM)
    path = lambda values: " ".join(f"{x(i):.1f},{y(value):.1f}" for i, value in enumerate(values))
    text = lambda at, words, more="": f'<text x="{at[0]:.1f}" y="{at[1]:.1f}" {more}>{words}</text>'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12" fill="#333">',
        f"<title>{caption}</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
    ]
    for loss in range(int(top) + 1):
        lines.append(f'<path d="M{LEFT} {y(loss):.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        lines.append(text((LEFT - 8, y(loss) + 4), loss, 'text-anchor="end"'))
    for step in range(0, len(losses) + 1, len(losses) // 4):
        lines.append(text((x(min(step, len(losses) - 1)), HEIGHT - BOTTOM + 18), step, 'text-anchor="middle"'))
    lines += [f'<path d="M{x(step):.1f} {TOP}V{HEIGHT - BOTTOM}" stroke="#d33" stroke-dasharray="3 3"/>' for step in killed]
    lines += [
        f'<polyline points="{path(undisturbed)}" fill="none" stroke="#9cc3ee" stroke-width="6"/>',
        f'<polyline points="{path(losses)}" fill="none" stroke="#123" stroke-width="1.5"/>',
        text((LEFT, 20), caption, 'font-weight="bold"'),
        text((LEFT, 36), "light: undisturbed · dark: with kills · dashed: kill -9 of a rank"),
        text((14, TOP - 8), "loss"),
        text(((LEFT + WIDTH) / 2, HEIGHT - 6), "step", 'text-anchor="middle"'),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def main():
    args, overrides = arguments(__doc__, add)
    undisturbed, _, _, expected = train(args, overrides, 0)
    losses, killed, gaps, weights = train(args, overrides, args.kills)
    print(f"{len(killed)} kills after steps {killed}; gaps {[round(gap, 3) for gap in gaps]} s")
    print(f"weights {expected[:16]} and {weights[:16]}")
    assert weights == expected and losses == undisturbed, "the kills changed the run"
    with open(args.svg, "w") as file:
        file.write(drawing(undisturbed, losses, killed, f"{len(killed)} kills, {len(losses)} steps: the same losses and weights, bit for bit"))


if __name__ == "__main__":
    main()
