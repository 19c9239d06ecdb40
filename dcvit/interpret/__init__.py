"""Analysis of the heads of a trained model."""
