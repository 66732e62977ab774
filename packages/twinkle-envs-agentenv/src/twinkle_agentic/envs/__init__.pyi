# For type checkers in this tree only: core owns this package.
