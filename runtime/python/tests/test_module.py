"""The module against the command that is installed beside it: `python -m unittest discover runtime/python/tests`."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path

import phalanx


class Jobs(unittest.TestCase):
    def setUp(self) -> None:
        self._scratch = tempfile.TemporaryDirectory()
        self.addCleanup(self._scratch.cleanup)
        self.folder = Path(self._scratch.name)
        text = self.folder / "text.txt"
        text.write_text("".join(f"The {i}th hoplite holds the line. " for i in range(400)))
        self.job = {
            "model": {"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
            "tokenizer": "bytes",
            "datasets": [{"path": text, "type": "completion"}],
            "val_set_size": 0.1,
            "sequence_len": 32,
            "micro_batch_size": 2,
            "max_steps": 6,
            "eval_steps": 3,
            "learning_rate": 1e-2,
            "output_dir": self.folder / "out",
        }

    def train(self, **keys: object) -> phalanx.Run:
        run = phalanx.train(self.job, **keys)
        self.addCleanup(run._finish)
        return run

    def test_events_and_files_of_a_run_have_the_same_measurements(self) -> None:
        run = self.train()

        events = list(run)
        ended, metrics = run.wait(), phalanx.metrics(self.folder / "out")

        steps = [event for event in events if isinstance(event, phalanx.Step)]
        self.assertEqual([step.step for step in steps], [1, 2, 3, 4, 5, 6])
        self.assertEqual(steps, metrics.steps)
        self.assertEqual([event for event in events if isinstance(event, phalanx.Eval)], metrics.evals)
        self.assertEqual([one.step for one in metrics.evals], [3, 6])
        self.assertEqual(metrics.losses, metrics.column("loss"))
        self.assertEqual(metrics.column("total_steps"), [6.0] * 6)
        self.assertTrue(all(step.loss > 0 and step.tokens_per_s > 0 for step in steps))
        (started,) = (event for event in events if isinstance(event, phalanx.Started))
        self.assertEqual((started.total_steps, started.mesh["tp"], started.resumed_from), (6, 1, None))
        self.assertTrue(ended.finished and ended.steps == 6)
        self.assertTrue(ended.model_dir and (ended.model_dir / "config.json").is_file())

    def test_keys_override_those_of_a_file(self) -> None:
        file = self.folder / "my.yaml"
        file.write_text("max_steps: 9\ntokenizer: bytes\nsequence_len: 32\nmicro_batch_size: 2\nmodel: {model_type: llama, hidden_size: 32, "
                        "intermediate_size: 64, num_hidden_layers: 1, num_attention_heads: 4}\n")

        keys = {"datasets.0.path": self.folder / "text.txt", "datasets.0.type": "completion", "output_dir": self.folder / "out"}
        ended = phalanx.train(file, max_steps=2, bf16=False, **keys).wait()

        self.assertEqual(ended.steps, 2)

    def test_mistake_in_a_key_is_an_error_with_the_command_line_s_words(self) -> None:
        with self.assertRaises(phalanx.JobError) as caught:
            self.train(learning_rat=1).wait()

        self.assertEqual(caught.exception.exit_code, 2)
        self.assertIn("did you mean `learning_rate`?", str(caught.exception))

    def test_killed_run_is_an_error_with_the_signal(self) -> None:
        run = self.train(max_steps=100_000)
        next(event for event in run if isinstance(event, phalanx.Step))

        os.kill(run.pid, signal.SIGKILL)

        with self.assertRaises(phalanx.JobError) as caught:
            run.wait()
        self.assertEqual(caught.exception.exit_code, -signal.SIGKILL)

    def test_stopped_run_saves_and_the_same_call_resumes(self) -> None:
        with self.train(max_steps=100_000) as run:
            next(event for event in run if isinstance(event, phalanx.Step))

        stopped = run.wait()
        again = self.train(max_steps=100_000)
        started = next(event for event in again if isinstance(event, phalanx.Started))

        self.assertFalse(stopped.finished)
        self.assertEqual(started.resumed_from, stopped.checkpoint)
        self.assertEqual(started.first_step, stopped.steps)

    def test_events_that_were_not_read_do_not_stop_a_run(self) -> None:
        run = self.train(max_steps=400)

        run._process.wait()

        self.assertEqual(sum(isinstance(event, phalanx.Step) for event in run), 400)

    def test_interpreter_that_ends_stops_its_run(self) -> None:
        program = self.program("")

        pid = int(program.stdout.readline())
        program.wait()

        self.assert_saved_and_gone(pid)

    def test_interrupt_stops_the_run_whose_events_are_read(self) -> None:
        program = self.program("for event in run: pass")
        pid = int(program.stdout.readline())

        program.send_signal(signal.SIGINT)

        self.assertIn("KeyboardInterrupt", program.communicate()[1].decode())
        self.assert_saved_and_gone(pid)

    def program(self, end: str) -> subprocess.Popen[bytes]:
        """Another interpreter, which starts a long run and prints the process of it after the first step."""
        lines = [
            "import json, sys, phalanx",
            "run = phalanx.train(json.loads(sys.argv[1]))",
            "next(event for event in run if isinstance(event, phalanx.Step))",
            "print(run.pid, flush=True)",
            end,
        ]
        self.job["max_steps"] = 100_000
        words = [sys.executable, "-c", "\n".join(lines), json.dumps(self.job, default=os.fspath)]
        program = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self.addCleanup(program.communicate)
        return program

    def assert_saved_and_gone(self, pid: int) -> None:
        deadline = time.monotonic() + 10
        while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        self.assertFalse(Path(f"/proc/{pid}").exists())
        self.assertTrue(list((self.folder / "out" / "checkpoints").glob("step-*")))

    def test_module_is_the_command(self) -> None:
        of = lambda *words: subprocess.run([*words, "--version"], check=True, stdout=subprocess.PIPE).stdout

        said = of(sys.executable, "-m", "phalanx")

        self.assertEqual(said, of(phalanx.command()))
        self.assertTrue(said.decode().startswith(f"phalanx {phalanx.__version__} "), said)


class Lines(unittest.TestCase):
    def test_number_that_overflowed_is_nan_and_a_step_that_ran_again_counts_once(self) -> None:
        with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
            line = '{"step": %d, "loss": %s, "grad_norm": 1, "lr": 1, "tokens_per_s": 1, "step_ms": 1, "epoch": 1, ' \
                '"predicted_tokens": 1, "memory_bytes": 1, "rewards/chosen": 0.5}\n'
            file.write(line % (1, "2.5") + line % (2, "7") + line % (2, "null") + line[:20])
            file.flush()

            metrics = phalanx.metrics(file.name)

        self.assertEqual([step.step for step in metrics.steps], [1, 2])
        self.assertEqual(metrics.losses[0], 2.5)
        self.assertNotEqual(metrics.losses[1], metrics.losses[1])
        self.assertEqual(metrics.column("rewards/chosen"), [0.5, 0.5])


if __name__ == "__main__":
    unittest.main()
