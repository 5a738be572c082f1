"""What is sent next: requests at planned times, as slots become free, or turns after answers."""
