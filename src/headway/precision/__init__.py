"""Numbers with fewer bits: autocast, loss scaling, FP8, quantization."""
