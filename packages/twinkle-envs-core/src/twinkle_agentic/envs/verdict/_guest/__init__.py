"""What runs beside the solution; the source of these modules is joined into one program."""
