"""What the fault tests share: processes that are killed, a load, and the judge of its history."""
