"""What the labs say of one model, side by side with theory."""
