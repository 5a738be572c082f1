"""Is a trial's number to be believed? Evidence in, findings out."""
