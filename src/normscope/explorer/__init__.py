"""The explorer: a browser application that shows token dynamics, models, training runs and the ledger."""
