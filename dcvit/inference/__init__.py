"""Inference with trained models: classification of image files, text generation, and lm-evaluation-harness."""
