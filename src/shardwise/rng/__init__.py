"""The numbers that one device would have drawn, for those who keep only a part of them."""
