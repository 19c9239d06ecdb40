"""What the heads of a trained model do."""
