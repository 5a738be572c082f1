"""Estimates the highest rate from every request of every trial, by replaying queues that explain them."""
