"""What an experiment gives back, as declarations: findings, figures and sections, drawn by the report."""
