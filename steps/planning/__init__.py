"""What `plan` states of a step that trains: its size, memory, speed, time and cost."""
