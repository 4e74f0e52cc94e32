"""What tests of several folders share: doubles that keep the rules of what they stand for."""
