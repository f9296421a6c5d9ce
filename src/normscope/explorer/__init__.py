"""The explorer: a browser application that shows token dynamics, models, training runs and the ledger."""

HOST, PORT = "127.0.0.1", 8347  # where the server listens unless told otherwise
