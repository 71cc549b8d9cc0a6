"""Prints the probabilities that transformers' logits processors leave: the golden numbers of `runtime/src/api/sampling.rs`."""

import torch
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

LOGITS = [1.2, -0.7, 0.3, 2.5, -1.9, 0.9, 2.1, 0.0]
TEXT = [3, 1, 3, 4]


def main() -> None:
    processors = LogitsProcessorList(
        [
            RepetitionPenaltyLogitsProcessor(1.3),
            TemperatureLogitsWarper(0.7),
            TopKLogitsWarper(5),
            TopPLogitsWarper(0.9),
        ]
    )
    scores = processors(torch.tensor([TEXT]), torch.tensor([LOGITS]))
    probabilities = torch.softmax(scores.double(), dim=-1)[0]
    kept = [(i, p) for i, p in enumerate(probabilities.tolist()) if p > 0]
    for token, probability in sorted(kept, key=lambda pair: -pair[1]):
        print(f"({token}, {probability:.9f}),")


if __name__ == "__main__":
    main()
