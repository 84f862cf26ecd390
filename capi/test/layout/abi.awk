# capi/abi/abi.txt as a list of macros that layout_test.c, or a program of C++, defines.
/^(#|experimental )/ { next }
/;$/       { print "DECLARATION(" substr($0, 1, length($0) - 1) ")"; next }
/ = /      { print "CONSTANT(" $1 ", " $3 ")"; next }
/ bytes$/  { owner = substr($1, 1, length($1) - 1); print "STRUCT(" owner ", " $2 ")"; next }
/^  [0-9]/ {
  name = substr($3, 1, length($3) - 1)
  type = substr($0, index($0, ": ") + 2)
  print "MEMBER(" owner ", " name ", " $1 ", " substr($2, 2) ", " type ")"
  next
}
{ print "#error a line of abi.txt that is none of these: " $0 }
