"""What a computation takes from the machine: files that a user names, memory and disk."""
