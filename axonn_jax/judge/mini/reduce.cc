//@ name reduce_squares_of_odd_elements
//@ size 2000000
//@ prompt
/* Return the sum of the squares of all odd elements of x.
{model}   Example:

   input: [3, 2, -1, 4]
   output: 10
*/
long long sumOddSquares(std::vector<int> const& x) {
//@ serial
    long long sum = 0;
    for (int value : x) {
        if (value % 2 != 0) sum += (long long) value * value;
    }
    return sum;
}
//@ omp
    long long sum = 0;
    #pragma omp parallel for reduction(+ : sum)
    for (size_t i = 0; i < x.size(); i += 1) sum += (x[i] & 1) * (long long) x[i] * x[i];
    return sum;
}
//@ driver
struct Case {
    std::vector<int> x;
    long long sum;
};

Case draw(size_t size, Random &random) {
    Case made{{}, -1};
    for (size_t i = 0; i < size; i += 1) made.x.push_back(whole(random, -1000, 1000));
    return made;
}

void sample(Case &c) { c.sum = sumOddSquares(c.x); }
void best(Case &c) { c.sum = reference::sumOddSquares(c.x); }
bool same(Case const &got, Case const &wanted) { return got.sum == wanted.sum; }
