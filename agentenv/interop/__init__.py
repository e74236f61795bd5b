"""Episodes as the records that trainers take, one file for each of them."""
