"""What makes the process beside app.py: with it the only place that makes threads, clocks and sockets."""
