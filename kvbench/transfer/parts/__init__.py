"""What several transfer backends share, and parts of one that need a file of their own."""
