"""Who is missing, died or froze: start-up, heartbeats, one report."""
