"""What a computation takes from the machine: files that a user names, memory, disk, and signals that end a process."""
